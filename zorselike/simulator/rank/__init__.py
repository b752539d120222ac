"""One rank in the simulator: its actions as tasks on the streams of its device, with copies to the host."""
