"""Poplar: its clusters, its planner's shares of rows and its figures."""
