"""What the program itself costs: host seconds of actions, units and updates."""
