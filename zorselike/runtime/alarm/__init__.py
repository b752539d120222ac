"""Ranks fail together: heartbeats to rank 0, which tells every rank who failed first."""
