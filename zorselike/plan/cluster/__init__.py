"""Clusters: nodes, devices, links, zones and prices, as data and as the TOML that people write."""
