"""Proves a schedule complete, in order, within its memory and free of deadlock, before it runs
(Zorse 5.2)."""
