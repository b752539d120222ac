"""What `tools/bench_offload.py` is made of: jobs that a fresh process each runs, and what is made of them."""
