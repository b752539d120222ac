"""Ranks that do the same at the same time, simulated as one with the traffic of all."""
