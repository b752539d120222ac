"""Whether candidates find room, and may be run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan, list_largest
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.estimate.communicators import Communicators
from zorselike.planner.estimate.memory import RankMemory
from zorselike.planner.problem import PlanProblem

_FAR_OVER, _FAR_UNDER = 2.5, 0.5
"""Shares of a device's memory: estimates beyond these are not walked; they are 0.55 to 2.7 times what a walk
finds."""
_FEW_WALKS, _MARGIN = 3, 0.12
"""From so many walks on, estimates are trusted that are by this share further from the limit than these
say."""
MOST_ACTIONS_OF_REPLICAS = 200_000
"""Of a step with tensor-parallel replicas, whose ranks are all simulated, that nobody asked for."""

Class = tuple[str, int, int]
"""Replicas that are alike: their type of device, its bytes of memory, and how many there are."""
Overfull = Mapping[int, Mapping[Class, tuple[int, int]]]
"""By group and class of devices that are too small: bytes that are needed, and that there are."""


class Room:
    """Of the devices and hosts of one problem; keeps what walks found."""

    def __init__(self, problem: PlanProblem, table: LayerTable, memory: RankMemory) -> None:
        self._problem, self._table, self._memory = problem, table, memory
        self._communicators = Communicators(problem, table)
        self._ratios: dict[object, tuple[float, float, int]] = {}
        """By what devices have in common, the least and the most that walks found, by their estimates, and
        how many did."""

    def may_run(self, candidate: CandidatePlan) -> bool:
        """Whether the runtime takes it, memory apart, and a simulation of it does not take too long."""
        is_long = candidate.num_actions > MOST_ACTIONS_OF_REPLICAS and candidate.degree > 1
        if is_long and self._problem.fixed.tensor_parallel is None:
            return False
        may_bound = all(
            group.mode.may_bound_in_flight and (candidate.owners.count(g) == 1 or group.mode.may_return)
            for g, group in enumerate(candidate.groups)
        )
        return (may_bound or not candidate.bounds_in_flight) and not self._shares_unevenly(candidate)

    def _shares_unevenly(self, candidate: CandidatePlan) -> bool:
        """Whether a ministage with ZeRO 3 holds both ends of a tie while its devices have different numbers
        of microbatches, which the runtime refuses."""
        for owner, borrower in self._table.ties:
            group = candidate.groups[candidate.owner_of(owner)]
            is_together = candidate.ministage_of(owner) == candidate.ministage_of(borrower)
            if is_together and group.mode.zero == 3 and len({*map(len, group.sizes)}) > 1:
                return True
        return False

    def has_room(self, candidate: CandidatePlan) -> bool:
        """Whether it fits every device and host, and may be run."""
        return (
            self.may_run(candidate)
            and not self.find_overfull(candidate)
            and not self._memory.overfull_hosts(candidate)
        )

    def find_overfull(self, candidate: CandidatePlan, *, only: int | None = None) -> Overfull:
        """Of all groups, or `only` this one."""
        over: dict[int, dict[Class, tuple[int, int]]] = {}
        for g, group in enumerate(candidate.groups):
            if only not in (None, g):
                continue
            for position in list_largest(group.sizes, self.list_classes(group)):
                device = group.firsts[position]
                limit = self._memory.limit_bytes(device)
                if limit is None:
                    continue
                need = self.need_bytes(candidate, g, position, limit)
                need = self._communicators.add_to(need, candidate, g, limit)
                device_class = self.class_of(device, group.degree_of(position))
                worst = over.get(g, {}).get(device_class, (0, 1))
                if need > limit and need / limit > worst[0] / worst[1]:
                    over.setdefault(g, {})[device_class] = need, limit
        return over

    def need_bytes(self, candidate: CandidatePlan, g: int, position: int, limit: int) -> int:
        """As walked, where an estimate is not far from the limit, and neither are those times what walks of
        devices like this one found to be more or less."""
        estimate = self._memory.estimate_bytes(candidate, g, position)
        if estimate > _FAR_OVER * limit or estimate < _FAR_UNDER * limit:
            return estimate
        group = candidate.groups[g]
        key = (
            group.mode,
            self._problem.device_types[group.firsts[position]],
            candidate.owners.count(g),
            candidate.owners[-1] == g,
            group.max_in_flight is None,
            bool(group.sizes[position]),
            group.degree_of(position),
        )
        low, high, number = self._ratios.get(key, (math.inf, 0.0, 0))
        if number >= _FEW_WALKS:
            if estimate * high * (1 + _MARGIN) < limit:
                return round(estimate * high)
            if estimate * low * (1 - _MARGIN) > limit:
                return round(estimate * low)
        need = self._memory.need(candidate, g, position).device_bytes
        self._ratios[key] = min(low, need / estimate), max(high, need / estimate), number + 1
        return need

    def list_classes(self, group: CandidateGroup) -> list[Class]:
        """Of its replicas."""
        return [self.class_of(device, group.degree_of(i)) for i, device in enumerate(group.firsts)]

    def class_of(self, device: int, degree: int) -> Class:
        return self._problem.device_types[device], self._memory.limit_bytes(device) or 0, degree
