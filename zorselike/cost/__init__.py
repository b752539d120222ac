"""What a plan costs: memory, time and money. No torch."""

from zorselike.cost.memory import MemoryWalk, MinistageBytes, walk_memory
from zorselike.cost.purposes import Purpose

__all__ = ["MemoryWalk", "MinistageBytes", "Purpose", "walk_memory"]
