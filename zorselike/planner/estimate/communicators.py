"""What a candidate's devices need for communicators beyond those that a walk of one device knows
(`memory.py`): two for each rank with which rows are exchanged, one for each direction.

With how many that is depends on how rows are dealt, which takes longer than an estimate: so it is only asked
where it decides whether something fits. What wraps around the pipeline goes over host memory, and so do edges
beyond `MOST_DIRECT_EDGES`.
"""

from __future__ import annotations

from itertools import pairwise

from zorselike.cost.catalogue import CPU
from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.candidate.computers import list_computers
from zorselike.planner.candidate.deal_rows import count_peers, describe_dealing
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.problem import PlanProblem
from zorselike.schedule.contract import MOST_DIRECT_EDGES

MOST_KEPT = 4096
"""Ways of dealing rows whose peers are remembered."""


class Communicators:
    """Counts those of one problem."""

    def __init__(self, problem: PlanProblem, table: LayerTable) -> None:
        self._problem, self._table = problem, table
        overheads = problem.profile.overheads
        self._each = overheads.communicator_bytes * (1 + overheads.allocator_share)
        self._peers: dict[object, list[int]] = {}
        """By what decides how rows are dealt."""

    def add_to(self, need: int, candidate: CandidatePlan, g: int, limit: int) -> int:
        """Bytes of a device of group `g` with its communicators; at least those where there is room for all
        that there could be, or not even for these. `limit`: the device's bytes."""
        device = candidate.groups[g].devices[0]
        if not self._each or self._problem.device_types[device] == CPU:
            return need
        pairs = {pair for pair in pairwise(candidate.owners) if pair[0] < pair[1] and g in pair}
        others = [a + b - g for a, b in pairs]
        known = self._count_known(candidate, g)
        most = self._bytes_of(sum(len(candidate.groups[other].devices) for other in others), known)
        least = self._bytes_of(len(others), known)
        if need + most <= limit or need + least > limit:
            return need + least
        dealing = describe_dealing(candidate)
        if dealing not in self._peers:
            if len(self._peers) >= MOST_KEPT:
                self._peers.clear()
            computers = [list_computers(own, self._problem) for own in candidate.groups]
            peers = count_peers(candidate, self._table, self._problem.nodes, computers)
            self._peers[dealing] = [max(own) for own in peers]
        return need + self._bytes_of(self._peers[dealing][g], known)

    def _bytes_of(self, num_peers: int, known: int) -> int:
        return round(max(0, min(2 * num_peers, MOST_DIRECT_EDGES) - known) * self._each)

    def _count_known(self, candidate: CandidatePlan, g: int) -> int:
        """Those of a walk, which has one rank before and after each of the device's ministages."""
        own = [i for i, owner in enumerate(candidate.owners) if owner == g]
        return 2 * (own[-1] > own[0] or own[0] > 0) + 2 * (
            own[-1] > own[0] or own[-1] < len(candidate.owners) - 1
        )
