"""Elastic jobs of CPU ranks on this machine, and what is done to them."""
