"""What other systems would make of the same devices, on the same costs (the baselines of Zorse section 6)."""
