"""Zorse, Poplar and Sailor: what their authors published, read and simulated by ours."""
