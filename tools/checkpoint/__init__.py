"""What is done to checkpoints and their writers by `torture_checkpoint.py`."""
