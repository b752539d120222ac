"""Flows that share the capacities of a network (Sailor 4.3)."""
