"""The parts of `tools/bench_runtime.py`."""
