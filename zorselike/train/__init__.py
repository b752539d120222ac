"""The program: job configuration, data, optimizer, metrics and the loop around `HeteroPipeline`."""
