"""Devices to groups: the minimum k-cut by SPLIT, merges, and the partitions a person would try
(Zorse 4.3.2)."""
