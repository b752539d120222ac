"""Layers to ministages, in integers (Zorse 4.3.3)."""
