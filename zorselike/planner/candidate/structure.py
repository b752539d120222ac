"""What tells plans apart for a reader: who works with whom, and the larger trades of memory for time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zorselike.cost.catalogue import find_memory_bytes
from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.problem import PlanProblem

Structure = tuple[object, ...]


class Structures:
    """Tells structures of plans of one problem."""

    def __init__(self, problem: PlanProblem) -> None:
        cluster = problem.cluster
        self._nodes = problem.nodes
        memory = [find_memory_bytes(cluster, place) or 0 for place in cluster.places]
        self._kinds = list(zip(problem.device_types, memory, strict=True))
        """What each device is, apart from where."""
        kinds: dict[object, int] = {}
        self._node_kinds = [kinds.setdefault(replace(node, name=""), len(kinds)) for node in cluster.nodes]
        """The same where only the name is another."""

    def describe(self, candidate: CandidatePlan, iteration_s: float) -> set[Structure]:
        """Plans of which one of these is equal are the same to a reader.

        They differ in smaller things only, such as rows, layers, what is offloaded, or which of a node's
        alike devices is which; or they have other nodes of the same kind and take the same time: if links
        told these apart, they would not.
        """
        numbers = self._number_nodes(candidate)
        mirrored = _describe(candidate, lambda d: (*numbers[self._nodes[d]], *self._kinds[d]))
        return {
            _describe(candidate, lambda d: (self._nodes[d], *self._kinds[d])),
            (f"{iteration_s:.6g}", *mirrored),
        }

    def _number_nodes(self, candidate: CandidatePlan) -> dict[int, tuple[int, int]]:
        """Nodes by their kind, and which of that kind each is in the order of the groups."""
        numbers: dict[int, tuple[int, int]] = {}
        for group in candidate.groups:
            for node in (self._nodes[device] for device in sorted(group.devices)):
                if node not in numbers:
                    kind = self._node_kinds[node]
                    numbers[node] = kind, sum(own == kind for own, _ in numbers.values())
        return numbers


def _describe(candidate: CandidatePlan, name: Callable[[int], tuple[Any, ...]]) -> Structure:
    """A device by itself does the same in all ZeRO stages."""
    groups = [
        (
            tuple(sorted(map(name, group.devices))),
            group.mode.zero if len(group.devices) > 1 else 0,
            group.mode.recompute,
            tuple(sorted(group.degrees)),
        )
        for group in candidate.groups
    ]
    return (*groups, candidate.bounds_in_flight)
