"""The search for the best plan: which candidates are enumerated, evaluated and simulated, within a budget
(Zorse 4.3; Sailor 4.2)."""
