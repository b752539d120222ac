"""Rows to the ranks of a group, per ZeRO stage, from measured curves (Poplar, Algorithm 2)."""
