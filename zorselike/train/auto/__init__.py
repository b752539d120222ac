"""`[hetero] plan = "auto"`: measure what is missing, plan, keep the plan for later runs (Sailor 3)."""
