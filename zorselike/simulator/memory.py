"""Every rank's memory, walked when asked for: that takes longer than the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import overload

from zorselike.cost.memory import walk_memory
from zorselike.cost.purposes import MemoryWalk
from zorselike.cost.step_costs import StepCosts
from zorselike.plan.plan import Plan
from zorselike.schedule.actions import TRANSFERS, Action, edge_of
from zorselike.schedule.checker.rendezvous import find_wrapping
from zorselike.schedule.contract import SENDS_KEPT_BY_NCCL


class MemoryWalks(Sequence[MemoryWalk]):
    """By rank; ranks that differ only in their peers share one walk."""

    def __init__(
        self,
        plan: Plan,
        actions: Mapping[int, Sequence[Action]],
        costs: StepCosts,
        first: Mapping[int, int] | None = None,
    ) -> None:
        """`first`: by rank, the one whose walk is the same, where that is known."""
        self._plan, self._actions, self._costs, self._first = plan, actions, costs, first
        self._found: dict[int, MemoryWalk] = {}
        self._alike: dict[object, MemoryWalk] = {}

    def __len__(self) -> int:
        return len(self._actions)

    @overload
    def __getitem__(self, rank: int) -> MemoryWalk: ...
    @overload
    def __getitem__(self, rank: slice) -> list[MemoryWalk]: ...
    def __getitem__(self, rank: int | slice) -> MemoryWalk | list[MemoryWalk]:
        if isinstance(rank, slice):
            return [self[each] for each in range(len(self))[rank]]
        rank = range(len(self))[rank]
        if rank not in self._found:
            walk = self._walk(rank if self._first is None else self._first[rank])
            if walk.peak_position is not None:  # The rank's own action, with its own peer.
                walk = replace(walk, peak_action=self._actions[rank][walk.peak_position])
            self._found[rank] = walk
        return self._found[rank]

    def _walk(self, rank: int) -> MemoryWalk:
        """Of this rank, or of one for which everything is equal that a walk depends on."""
        costs, actions = self._costs, self._actions[rank]
        context_bytes = costs.context_bytes[rank] if costs.context_bytes else 0
        is_cpu = bool(costs.is_cpu) and costs.is_cpu[rank]
        by_host = find_wrapping(self._plan, rank, actions)
        edges = [edge_of(rank, a) if a.kind in TRANSFERS else None for a in actions]
        key = (
            self._plan.group_of_rank[rank],
            tuple(microbatch.num_rows for microbatch in self._plan.microbatches_of_rank(rank)),
            tuple(sorted(costs.sizes[rank].items())),
            context_bytes,
            is_cpu,
            len({edge for edge in edges if edge not in by_host}),
            tuple(
                (a.kind, a.ministage, a.microbatch, (a.stop or 0) - (a.start or 0), edge in by_host)
                for a, edge in zip(actions, edges, strict=True)
            ),
        )
        if key not in self._alike:
            self._alike[key] = walk_memory(
                self._plan,
                rank,
                actions,
                costs.sizes[rank],
                context_bytes=context_bytes,
                num_sends_kept=None if is_cpu else SENDS_KEPT_BY_NCCL,
                on_gpu=not is_cpu,
                by_host=by_host,
                communicator_bytes=costs.communicator_bytes,
            )
        return self._alike[key]
