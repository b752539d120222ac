"""Sailor: its profiles, measured runs, simulator's arithmetic, planner's cases and traces."""
