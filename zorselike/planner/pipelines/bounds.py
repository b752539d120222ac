"""Lower bounds on what a pipeline takes, by which degrees of data parallelism are left out unsearched.

No stage can be faster than the devices allow: with a straggler of t seconds, a stage of an option holds so
many layers, and devices are enough for so many stages. Egress, sends beyond the least and memory beyond that
of the last stage are left out, so that the bounds hold for every pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from math import gcd, inf, prod
from typing import NamedTuple

import numpy as np

from zorselike.planner.pipelines.costs import PipelineCosts, Pool

_MAX_STATES = 20_000
"""Largest reach table: a larger one costs more than it prunes."""
_SLACK = 1e-9
"""Relative, for sums in another order."""
_BOUND_ERROR = 0.01
"""How near the bound on the straggler comes to the least that the table allows."""


@dataclass(frozen=True)
class Floors:
    """What no pipeline is under."""

    straggler_s: float
    sum_s: float
    update_s: float
    sync_s: float
    device_dollars: float
    """Rent of the devices for as long as they compute, and of the cheapest stage's while all update."""
    num_microbatches: int

    @property
    def iteration_s(self) -> float:
        return (self.num_microbatches - 1) * self.straggler_s + self._rest_s

    def slowest_straggler_s(self, iteration_s: float) -> float:
        """With a slower one a step takes longer than `iteration_s`."""
        most = iteration_s * (1 + _SLACK) - self._rest_s
        # One microbatch: its stages' times add up, and the straggler's is one of them.
        return most / (self.num_microbatches - 1) if self.num_microbatches > 1 else iteration_s

    @property
    def _rest_s(self) -> float:
        return self.sum_s + self.update_s + self.sync_s


class Bounds:
    """Bounds of one pipeline problem; tables are made when first asked for."""

    def __init__(self, costs: PipelineCosts, pools: Sequence[Pool]) -> None:
        self.costs = costs
        self.quota = tuple(pool.num_devices for pool in pools)
        self._prices = tuple(pool.dollars_per_device_s for pool in pools)
        self.options = tuple(
            k
            for k, uses in enumerate(costs.uses)
            if any(uses) and all(u <= q for u, q in zip(uses, self.quota, strict=True))
        )
        """Those for which there are devices."""

    @cached_property
    def layer_s(self) -> dict[int, tuple[float, ...]]:
        layers = range(self.costs.num_layers)
        return {k: tuple(self.costs.layer_s(k, layer) for layer in layers) for k in self.options}

    @cached_property
    def prefix_s(self) -> dict[int, tuple[float, ...]]:
        """Seconds of the layers before each, and of all."""
        return {k: tuple(accumulate(times, initial=0.0)) for k, times in self.layer_s.items()}

    @cached_property
    def least_s(self) -> tuple[float, ...]:
        """Seconds of the layers before each, every layer on what computes it fastest."""
        fastest = [min(times) for times in zip(*self.layer_s.values(), strict=True)]
        return tuple(accumulate(fastest, initial=0.0))

    @cached_property
    def least_dollars(self) -> tuple[float, ...]:
        """Rent for the layers before each while they compute, every layer on what computes it cheapest."""
        m = self.costs.num_microbatches
        rates = {k: self.dollars_per_s(k) for k in self.options}
        cheapest = [
            min(rates[k] * self.layer_s[k][layer] for k in self.options) * m
            for layer in range(self.costs.num_layers)
        ]
        return tuple(accumulate(cheapest, initial=0.0))

    def dollars_per_s(self, option: int) -> float:
        return sum(u * price for u, price in zip(self.costs.uses[option], self._prices, strict=True))

    @cached_property
    def update_floor_s(self) -> float:
        return self._dearest_layer(lambda k, layer: self.costs.update_s(k, layer, layer + 1))

    @cached_property
    def sync_floor_s(self) -> float:
        return self._dearest_layer(lambda k, layer: self.costs.sync_s(k, layer, layer + 1))

    def _dearest_layer(self, seconds: Callable[[int, int], float]) -> float:
        """Some stage holds the layer for which this is greatest."""
        return max(min(seconds(k, layer) for k in self.options) for layer in range(self.costs.num_layers))

    def rough(self) -> Floors | None:
        """In closed form; None if there are no devices for any stage."""
        if not self.options:
            return None
        return self._floors(self._fluid_straggler_s())

    def tight(self, limit_s: float) -> Floors | None:
        """By whole layers and stages; None if no pipeline has a straggler under `limit_s`."""
        return None if (found := self._integral_straggler_s(limit_s)) is None else self._floors(found)

    def _floors(self, straggler_s: float) -> Floors:
        cheapest = min(self.dollars_per_s(k) for k in self.options)
        return Floors(
            straggler_s=straggler_s,
            sum_s=self.least_s[-1],
            update_s=self.update_floor_s,
            sync_s=self.sync_floor_s,
            device_dollars=self.least_dollars[-1] + cheapest * (self.update_floor_s + self.sync_floor_s),
            num_microbatches=self.costs.num_microbatches,
        )

    def _fluid_straggler_s(self) -> float:
        """As if layers could be cut anywhere and all devices used."""
        weights = self._weights
        speed = min(
            sum(s * q for s, q in zip(self._speeds, self.quota, strict=True)),
            self.costs.num_layers * max(self._option_speeds.values()),
        )
        return max(sum(weights) / speed if speed else 0.0, *weights)

    @cached_property
    def _weights(self) -> tuple[float, ...]:
        """Least seconds of each layer: how much of it there is to do."""
        return tuple(after - before for before, after in pairwise(self.least_s))

    @cached_property
    def _option_speeds(self) -> dict[int, float]:
        """Weight a second at most."""
        return {
            k: max((w / t for w, t in zip(self._weights, self.layer_s[k], strict=True) if w > 0), default=0.0)
            for k in self.options
        }

    @cached_property
    def _speeds(self) -> tuple[float, ...]:
        """Weight a second of one device of each pool, at most in any option."""
        speeds = self._option_speeds
        return tuple(
            max((speeds[k] / sum(u) for k in self.options if (u := self.costs.uses[k])[p]), default=0.0)
            for p in range(len(self.quota))
        )

    def _integral_straggler_s(self, limit_s: float) -> float | None:
        """The least straggler by the reach table, or of one stage alone, to 1 %; rounded down."""
        alone = [
            self.prefix_s[k][-1] for k in self.options if self.costs.fits(k, 0, self.costs.num_layers, 1)
        ]
        least_alone = min(alone, default=inf)
        high = min(limit_s, least_alone)
        low = self._fluid_straggler_s()
        if low > high * (1 + _SLACK):
            return None
        low = min(low, high)
        if high == inf:
            return low
        if least_alone > high and not self._reaches(high):
            return None
        while high - low > _BOUND_ERROR * high:
            middle = (low + high) / 2
            if self._reaches(middle):
                high = middle
            else:
                low = middle
        return low

    def _reaches(self, cap_s: float) -> bool:
        return self.reach(cap_s).layers(self.quota) >= self.costs.num_layers

    @cached_property
    def _merged(self) -> _Merged:
        """Pools counted together, those of nearest speeds first, until the reach table is small enough; a
        table in which devices of one pool may stand in for another's is still a bound."""
        merged: list[tuple[tuple[int, ...], float]] = [((p,), speed) for p, speed in enumerate(self._speeds)]
        while True:
            found = self._measure(sorted(members for members, _ in merged))
            if prod(found.shape) <= _MAX_STATES or len(merged) == 1:
                return found
            a, b = min(combinations(merged, 2), key=lambda pair: abs(pair[0][1] - pair[1][1]))
            merged.remove(a)
            merged.remove(b)
            merged.append(((*a[0], *b[0]), max(a[1], b[1])))

    def _measure(self, pools: Sequence[tuple[int, ...]]) -> _Merged:
        dimensions, counts = [], []
        for members in pools:
            uses = [sum(self.costs.uses[k][p] for p in members) for k in self.options]
            step = gcd(*uses) or 1
            most = min(sum(self.quota[p] for p in members), self.costs.num_layers * max(uses))
            dimensions.append(_Dimension(members, step, most // step + 1))
            counts.append([use // step for use in uses])
        return _Merged(tuple(dimensions), dict(zip(self.options, zip(*counts, strict=True), strict=True)))

    def reach(self, cap_s: float) -> Reach:
        """How far pipelines can get from the first layer, by the devices that are left: stage by stage, for
        all numbers of devices at once, until nothing gets further."""
        sizes, moves = self._merged.shape, []
        for k, counts in self._merged.counts.items():
            if all(count < size for count, size in zip(counts, sizes, strict=True)):
                to = tuple(slice(count, None) for count in counts)
                back = tuple(slice(None, size - count) for count, size in zip(counts, sizes, strict=True))
                moves.append((to, back, np.array(self._extents(k, cap_s))))
        table = np.zeros(sizes, dtype=np.int64)
        while True:
            further = table.copy()
            for to, back, extents in moves:
                np.maximum(further[to], extents[table[back]], out=further[to])
            if np.array_equal(further, table):
                break
            table = further
        return Reach(self._merged.dimensions, table.ravel().tolist())

    def _extents(self, option: int, cap_s: float) -> list[int]:
        """Where a stage from each layer ends at most, non-falling."""
        prefix, room = self.prefix_s[option], cap_s - self.costs.least_send_s(option)
        last, stop, extents = self.costs.num_layers, 0, []
        for start in range(last + 1):
            stop = max(stop, start)
            while (
                stop < last
                and prefix[stop + 1] - prefix[start] <= room * (1 + 1e-12)
                and self.costs.fits(option, start, stop + 1, 1)
            ):
                stop += 1
            extents.append(stop)
        return extents


class _Dimension(NamedTuple):
    """Pools that are counted together, in steps."""

    members: tuple[int, ...]
    step: int
    size: int


@dataclass(frozen=True)
class Reach:
    """Layers that devices are enough for, by how many are left of each pool."""

    dimensions: tuple[_Dimension, ...]
    table: list[int]

    def layers(self, left: Sequence[int]) -> int:
        index = 0
        for members, step, size in self.dimensions:
            index = index * size + min(sum(left[p] for p in members) // step, size - 1)
        return self.table[index]


@dataclass(frozen=True)
class _Merged:
    """The dimensions of a reach table."""

    dimensions: tuple[_Dimension, ...]
    counts: dict[int, tuple[int, ...]]
    """Devices of each option, in steps."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dimension.size for dimension in self.dimensions)
