"""Contestants and folders of `bench_finetune.py`."""
