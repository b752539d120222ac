"""A stand-in for CUDA on machines without a GPU (run.py)."""
