"""What a plan costs: memory today; time and money with the profiler. No torch."""

from zorselike.cost.memory import PURPOSES, MemoryWalk, MinistageBytes, Purpose, walk_memory

__all__ = ["PURPOSES", "MemoryWalk", "MinistageBytes", "Purpose", "walk_memory"]
