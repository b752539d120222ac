"""Output of a run: log, metrics, traces, memory, and estimates compared with measurements."""
