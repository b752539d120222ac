"""What a plan costs: memory, time and money. No torch."""

from zorselike.cost.memory import PURPOSES, MemoryWalk, MinistageBytes, Purpose, walk_memory

__all__ = ["PURPOSES", "MemoryWalk", "MinistageBytes", "Purpose", "walk_memory"]
