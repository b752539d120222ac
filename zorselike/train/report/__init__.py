"""What a run says of itself: log, metrics, traces, memory, estimates against what was measured."""
