"""Answers of the planner for people: the best plan, what limits it, and what each kind of device adds."""
