"""One GPU: what offloading, compiling and deferred updates cost beside plain FSDP2, each variant in a process
of its own (`tools/bench_gpu.py`)."""
