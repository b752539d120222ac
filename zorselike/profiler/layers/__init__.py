"""Seconds and bytes of layers against rows (the profiles of Zorse 4.3.1, Poplar and Sailor)."""
