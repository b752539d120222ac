"""The most rows of the whole model that fit on each device under each ZeRO stage (Poplar, Algorithm 1)."""
