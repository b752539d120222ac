"""What ranks share in the simulator: links, transfers and collectives, under contention (Sailor 4.3)."""
