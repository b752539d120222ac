"""Ranks fail together: heartbeats to rank 0, and one verdict on every rank, naming who failed first."""
