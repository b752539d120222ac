"""A network in which flows of ranks that are alike are one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Protocol

from zorselike.cost.network import CollectiveOp, Flow
from zorselike.cost.step_costs import StepCosts
from zorselike.simulator.classes.rank_classes import NotAlikeError, RankClasses, describe_flow


class Flows(Protocol):
    """What the simulator asks of a network."""

    def transfer(self, source: int, target: int, num_bytes: float) -> Flow: ...

    def copy(self, rank: int, num_bytes: float, *, to_device: bool) -> Flow: ...

    def collective(self, op: CollectiveOp, ranks: Sequence[int], num_bytes: float) -> tuple[Flow, ...]: ...


class FoldedNetwork:
    """Flows of first ranks stand for those of all of their classes, on the first capacity of each class.

    Methods raise `NotAlikeError` unless all the flows that one stands for are alike, and each of the
    capacities that they pass carries as many of them as the others of its class.
    """

    def __init__(self, costs: StepCosts, classes: RankClasses) -> None:
        self._costs, self._network, self._classes = costs, costs.network, classes
        self._found: dict[object, Flow] = {}
        self._parts: dict[tuple[int, ...], list[list[int]]] = {}
        """By ranks of a collective: indices of its flows that are alike."""

    def transfer(self, source: int, target: int, num_bytes: float) -> Flow:
        key = (source, target, num_bytes)
        if key not in self._found:
            pairs = self._classes.channels[source, target]
            self._found[key] = self._fold([self._network.transfer(a, b, num_bytes) for a, b in pairs])
        return self._found[key]

    def copy(self, rank: int, num_bytes: float, *, to_device: bool) -> Flow:
        alike = self._classes.members[rank]
        return self._fold([self._network.copy(each, num_bytes, to_device=to_device) for each in alike])

    def collective(self, op: CollectiveOp, ranks: Sequence[int], num_bytes: float) -> tuple[Flow, ...]:
        flows = self._network.collective(op, ranks, num_bytes)
        key = tuple(ranks)
        if key not in self._parts:
            alike: dict[Hashable, list[int]] = {}
            for i, flow in enumerate(flows):
                alike.setdefault(self._describe(flow), []).append(i)
            self._parts[key] = [*alike.values()]
        return tuple(self._fold([flows[i] for i in part]) for part in self._parts[key])

    def _describe(self, flow: Flow) -> Hashable:
        return describe_flow(flow, self._costs, self._classes.first_capacity)

    def _fold(self, flows: Sequence[Flow]) -> Flow:
        if len({self._describe(flow) for flow in flows}) > 1:
            raise NotAlikeError
        first, sizes = self._classes.first_capacity, self._classes.sizes
        load = Counter(index for flow in flows for index in flow.capacities)
        passed = Counter((first[index], count) for index, count in load.items())
        if any(num != sizes[index] for (index, _), num in passed.items()):
            raise NotAlikeError
        path = tuple(index for index, count in sorted(passed) for _ in range(count))
        return replace(flows[0], capacities=path, times=len(flows))
