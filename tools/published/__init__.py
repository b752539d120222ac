"""Readers of other people's published measurements into our profiles, workloads, clusters and plans."""
