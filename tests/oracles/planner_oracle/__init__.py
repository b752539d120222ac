"""Questions to the planner drawn at random, and what holds its answers against all plans there are."""
