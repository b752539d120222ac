"""Every rank's memory, walked when somebody asks for it: that takes longer than the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

from zorselike.cost.memory import SENDS_KEPT_BY_NCCL, MemoryWalk, walk_memory
from zorselike.cost.step_costs import StepCosts
from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action


class MemoryWalks(Sequence[MemoryWalk]):
    """By rank; each is walked once."""

    def __init__(self, plan: Plan, actions: Mapping[int, Sequence[Action]], costs: StepCosts) -> None:
        self._plan, self._actions, self._costs = plan, actions, costs
        self._found: dict[int, MemoryWalk] = {}

    def __len__(self) -> int:
        return len(self._actions)

    @overload
    def __getitem__(self, rank: int) -> MemoryWalk: ...
    @overload
    def __getitem__(self, rank: slice) -> list[MemoryWalk]: ...
    def __getitem__(self, rank: int | slice) -> MemoryWalk | list[MemoryWalk]:
        if isinstance(rank, slice):
            return [self[own] for own in range(len(self))[rank]]
        rank = range(len(self))[rank]
        if rank not in self._found:
            costs = self._costs
            by_gloo = costs.is_cpu and costs.is_cpu[rank]
            self._found[rank] = walk_memory(
                self._plan,
                rank,
                self._actions[rank],
                costs.sizes[rank],
                context_bytes=costs.context_bytes[rank] if costs.context_bytes else 0,
                num_sends_kept=None if by_gloo else SENDS_KEPT_BY_NCCL,
            )
        return self._found[rank]
