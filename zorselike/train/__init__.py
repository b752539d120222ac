"""The training program: configuration, data, optimizer, metrics and the loop around `HeteroPipeline`."""
