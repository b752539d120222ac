"""What no plan of some devices is under: seconds and money of a step, from computation alone.

Every layer is computed at the number of rows at once that suits it best on its device, nothing is recomputed,
nothing waits: so the bounds hold for every plan.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate
from math import fsum
from typing import NamedTuple

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.plan.plan import RECOMPUTE
from zorselike.plan.workload import Workload
from zorselike.planner.layers.split_layers import GroupCosts, bound_slowest_s
from zorselike.planner.problem import PlanProblem

_LEAST_S = 1e-30
"""For speeds where a profile says that layers take no time."""


class _Layer(NamedTuple):
    kind: str
    has_backward: bool

    @property
    def name(self) -> str:
        return self.kind if self.has_backward else f"{self.kind}, forward alone"


def _list_layers(workload: Workload) -> list[_Layer]:
    """In model order; before the first that trains nothing needs a backward."""
    trains = list(accumulate((workload.kinds[kind].trains for _, kind in workload.layers), operator.or_))
    return [_Layer(kind, has) for (_, kind), has in zip(workload.layers, trains, strict=True)]


class DeviceBounds:
    """The bounds of one problem; layers are timed once for each type of device."""

    def __init__(self, problem: PlanProblem, clock: LayerTimeModel | None = None, *, degree: int = 1) -> None:
        """`degree`: of replicas of a plan that the planner would not make.

        Raises `ProfileError` if the profile is for another workload."""
        self._problem, self._degree = problem, degree
        self.clock = LayerTimeModel(problem.profile, problem.workload) if clock is None else clock
        self._layers = _list_layers(problem.workload)
        self._kinds = [layer.name for layer in self._layers]
        self._most_measured: dict[str, int] = {}
        for times in problem.profile.layers:
            before = self._most_measured.get(times.device, 1)
            self._most_measured[times.device] = max(before, int(times.rows[-1]))
        self.row_s, self.model_s = cache(self._row_s), cache(self._model_s)

    # -- seconds ---------------------------------------------------------------------------

    def bound_s(self, devices: Iterable[int]) -> float:
        """Seconds that a step takes at least on these devices or fewer of them.

        Args:
            devices: indices into `Cluster.places`, at least one.

        Raises:
            ProfileError: Neither the profile nor the catalogue says anything about one of them.
        """
        return self.bound_types_s(Counter(self._problem.device_types[device] for device in devices))

    def bound_types_s(self, counts: Mapping[str, int]) -> float:
        """The same by the number of devices of each type."""
        present = {device: number for device, number in counts.items() if number}
        rows = self._problem.global_batch
        # Devices of one type bound a step as one that is as fast as all of them.
        groups = [
            GroupCosts({kind: rows * seconds / number for kind, seconds in self.row_s(device).items()})
            for device, number in present.items()
        ]
        return max(bound_slowest_s(self._kinds, groups), self.chain_s(tuple(present)))

    @cached_property
    def _most_together(self) -> int:
        """Devices that may compute a row together, by tensor parallelism."""
        planned = self._problem.replicas.most_by_type(self._problem.usable).values()
        return max((self._degree, *planned))

    def chain_s(self, devices: Sequence[str]) -> float:
        """Seconds that one row takes through the whole model and back at least, every layer on the type of
        device that is fastest at it, and on as many of them together as may be."""
        layers = dict.fromkeys(self._layers)
        least_s = {layer.name: min(self._time(layer, device, 1) for device in devices) for layer in layers}
        return fsum(least_s[kind] for kind in self._kinds) / self._most_together

    def work(self, devices: Sequence[str]) -> float:
        """Rows of a step, each as the share of it that is left to do if every layer is on the type of device
        that is best at it: less than the rows where types differ in what they are good at. A step takes at
        least these by the sum of `1 / model_s` of its devices."""
        alone_s = {device: self.model_s(device) for device in devices}
        shares = (
            min(self.row_s(device)[kind] / alone_s[device] for device in devices) for kind in self._kinds
        )
        return self._problem.global_batch * fsum(shares)

    def _model_s(self, device: str) -> float:
        """Seconds of one row through all layers and back on one device of a type, at its best."""
        seconds = self.row_s(device)
        return max(fsum(seconds[kind] for kind in self._kinds), _LEAST_S)

    @cached_property
    def floor_s(self) -> float:
        """Seconds of a step that no plan of any of the usable devices is under, `max_devices` of them."""
        counts = Counter(self._problem.device_types[device] for device in self._problem.usable)
        most = self._problem.max_devices
        if most is None or most >= sum(counts.values()):
            return self.bound_types_s(counts)
        fastest = sorted(self.model_s(device) for device in counts.elements())[:most]
        together = self.work(tuple(counts)) / fsum(1 / seconds for seconds in fastest)
        return max(together, self.chain_s(tuple(counts)))

    def _row_s(self, device: str) -> dict[str, float]:
        """Seconds of one row through a layer of each kind and back, at the number of rows that is best."""
        return {layer.name: self._best_s(layer, device) for layer in dict.fromkeys(self._layers)}

    def _best_s(self, layer: _Layer, device: str) -> float:
        """Curves are straight beyond what was measured, so that the best is there, or at the most."""
        most = self._most_rows(layer.kind, device)
        sizes: set[int] = {*range(1, min(most, self._most_measured.get(device, 1)) + 1), most}
        return min(self._time(layer, device, rows) / rows for rows in sizes)

    def _most_rows(self, kind: str, device: str) -> int:
        """The most rows of a microbatch, by the batch and by what was found to fit; recomputed, or on several
        devices together, more may."""
        most = self._problem.most_rows_at_once
        if self._most_together > 1:
            return most
        limits = [self.clock.max_rows(kind, device, recompute) for recompute in RECOMPUTE]
        return min(most, max(most if limit is None else max(1, limit) for limit in limits))

    def _time(self, layer: _Layer, device: str, rows: int) -> float:
        forward_s = self.clock.forward_s(layer.kind, device, rows, "none")
        if not layer.has_backward:
            return forward_s
        return forward_s + self.clock.backward_s(layer.kind, device, rows, "none")

    # -- money -----------------------------------------------------------------------------

    def price_per_hour(self, devices: Iterable[int]) -> float:
        """Price of all nodes that have one of these devices; their idle devices are paid for as well."""
        nodes = {self._problem.nodes[device] for device in devices}
        return fsum(self._problem.cluster.nodes[node].price_per_hour for node in nodes)

    def bound_cost(self, devices: Sequence[int]) -> float:
        """Money of a step at least, of plans that use a device of each of these devices' nodes."""
        return self.price_per_hour(devices) * self.bound_s(devices) / 3600

    def least_cost(self, devices: Sequence[int]) -> float:
        """Money of a step at least, of plans that use any of these devices: as if the nodes that compute
        most for their price did it all."""
        problem = self._problem
        by_node: dict[int, list[str]] = {}
        for device in devices:
            by_node.setdefault(problem.nodes[device], []).append(problem.device_types[device])
        types = {device for own in by_node.values() for device in own}
        prices = [node.price_per_hour for node in problem.cluster.nodes]
        alike = {(prices[node], tuple(sorted(own))) for node, own in by_node.items()}
        price = min(price / fsum(1 / self.model_s(device) for device in own) for price, own in alike)
        return price * self.work(sorted(types)) / 3600
