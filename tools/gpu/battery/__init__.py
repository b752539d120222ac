"""What the first minutes on a GPU are to answer (`tools/gpu_battery.py`): is it right, is it fast and small,
is it foretold. Every part runs in a process of its own, with a limit."""
