"""Zorse: its clusters, plans, measured times and figures."""
