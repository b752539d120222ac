"""Measures the machine at hand: layers, the largest rows, memory, links; and finds what would break a job."""
