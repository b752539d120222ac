"""Devices to groups (Zorse 4.3.2): the minimum k-cut by SPLIT, merges, and what a person would try."""
