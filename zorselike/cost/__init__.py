"""What a plan costs: memory, time and money. No torch."""

from zorselike.cost.memory import walk_memory
from zorselike.cost.memory_walk import MemoryWalk
from zorselike.cost.purposes import Purpose
from zorselike.cost.sizes import MinistageBytes

__all__ = ["MemoryWalk", "MinistageBytes", "Purpose", "walk_memory"]
