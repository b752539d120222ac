"""What ranks share in the simulator: wires, transfers and collectives, under contention (Sailor 4.3)."""
