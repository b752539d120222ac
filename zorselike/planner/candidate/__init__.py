"""A plan before it has ranks: groups, layers, rows and how each group holds them, and the plan it becomes."""
