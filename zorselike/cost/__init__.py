"""What a plan costs: memory, time and money. No torch."""

from zorselike.cost.memory import walk_memory
from zorselike.cost.purposes import MemoryWalk, Purpose
from zorselike.cost.sizes import MinistageBytes

__all__ = ["MemoryWalk", "MinistageBytes", "Purpose", "walk_memory"]
