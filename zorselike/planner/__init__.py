"""Plans from a profile and a cluster. Free of torch."""
