"""`zorselike plan`: the best plan for a cluster."""
