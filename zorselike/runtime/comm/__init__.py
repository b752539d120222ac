"""Rows between groups, and what all ranks agree on (Zorse 4.2 and 5.2)."""
