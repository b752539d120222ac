"""So many nodes of each kind: all such mixes at once, with what no plan of their devices is under."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zorselike.planner.devices.bounds import DeviceBounds
from zorselike.planner.devices.node_kinds import NodeKind

MAX_MIXES = 50_000
"""Finer numbers of nodes than make so many are not tried."""
LEVELS = 20
"""Levels of seconds, money and devices, for each of which the best mix is picked."""
_ALIKE = 1e-6
"""Relative; money that differs by less is the same."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Mix(NamedTuple):
    """Whole nodes of each kind, and perhaps a part of one more."""

    num_nodes: tuple[int, ...]
    part_kind: int
    """The kind of that one; -1: there is none."""
    part_devices: int


@dataclass(frozen=True, eq=False)
class Mixes:
    """Arrays over mixes."""

    kinds: tuple[NodeKind, ...]
    bounds: DeviceBounds
    num_nodes: Ints
    """[num_mixes, num_kinds]"""
    part_kind: Ints
    part_devices: Ints

    def __getitem__(self, i: int) -> Mix:
        return Mix(tuple(self.num_nodes[i].tolist()), int(self.part_kind[i]), int(self.part_devices[i]))

    @cached_property
    def num_devices(self) -> Ints:
        sizes = np.array([len(kind.types) for kind in self.kinds], dtype=np.int64)
        found: Ints = self.num_nodes @ sizes + self.part_devices
        return found

    @cached_property
    def price_per_hour(self) -> Floats:
        prices = np.array([kind.price_per_hour for kind in self.kinds])
        found: Floats = self.num_nodes @ prices + np.where(self.part_kind >= 0, prices[self.part_kind], 0.0)
        return found

    @cached_property
    def bound_s(self) -> Floats:
        """As `DeviceBounds.bound_types_s`."""
        types = sorted({device for kind in self.kinds for device in kind.types})
        counts = self._count_types(types)
        speeds = counts @ np.array([1 / self.bounds.model_s(device) for device in types])
        present = (counts > 0) @ (1 << np.arange(len(types)))
        found = np.empty(len(counts))
        for code in np.unique(present):
            present_types = [device for t, device in enumerate(types) if code >> t & 1]
            at = present == code
            found[at] = np.maximum(
                self.bounds.work(present_types) / speeds[at], self.bounds.chain_s(present_types)
            )
        return found

    def _count_types(self, types: Sequence[str]) -> Ints:
        """[num_mixes, num_types]"""
        whole = np.array([[kind.types.count(device) for device in types] for kind in self.kinds])
        counts: Ints = self.num_nodes @ whole
        for k, kind in enumerate(self.kinds):
            firsts = np.array(
                [[kind.types[:n].count(device) for device in types] for n in range(len(kind.types) + 1)]
            )
            at = self.part_kind == k
            counts[at] += firsts[self.part_devices[at]]
        return counts

    @cached_property
    def bound_cost(self) -> Floats:
        found: Floats = self.price_per_hour * self.bound_s / 3600
        return found

    def pick_fastest(self, most: int) -> list[int]:
        """So many with the lowest bounds, of equal ones those with fewest devices."""
        return [int(i) for i in np.lexsort((self.num_devices, self.bound_s))[:most]]

    def pick(
        self,
        spent: Floats | Ints,
        *,
        spent_limits: Sequence[float] = (),
        seconds_limits: Sequence[float] = (),
    ) -> list[int]:
        """For levels of what is spent, between the least and the most, the fastest mix that spends no more,
        and for levels of seconds the one that spends least; of equal ones that with fewest devices. Limits
        are further levels."""
        by_spent = self._pick(spent, self.bound_s, spent_limits)
        return [*by_spent, *self._pick(self.bound_s, spent, seconds_limits)]

    def _pick(
        self, limited: Floats | Ints, wanted: Floats | Ints, further_levels: Sequence[float]
    ) -> list[int]:
        least, most = float(limited.min()), float(limited.max())
        levels = np.geomspace(least, most, LEVELS) if 0 < least < most else np.array([most])
        levels = np.concatenate([levels, [level for level in further_levels if level >= least]])
        rank = np.empty(len(limited), dtype=np.int64)
        rank[np.lexsort((limited, self.num_devices, _round(wanted)))] = np.arange(len(limited))
        by_limited = np.argsort(limited, kind="stable")
        best = by_limited[_first_least(rank[by_limited])]
        reach = np.searchsorted(limited[by_limited], levels * (1 + _ALIKE), side="right") - 1
        return [int(i) for i in dict.fromkeys(best[reach].tolist())]


def _first_least(values: Ints) -> Ints:
    """Where the least of all values up to each is; no two are equal."""
    least = np.minimum.accumulate(values)
    where = {value: i for i, value in enumerate(values.tolist())}
    return np.array([where[value] for value in least.tolist()])


def _round(values: Floats | Ints) -> Floats:
    """For comparing."""
    with np.errstate(divide="ignore"):
        found: Floats = np.round(np.log(values) / _ALIKE)
    return found


def mix_kinds(
    kinds: Sequence[NodeKind], bounds: DeviceBounds, *, max_devices: int | None = None, coarse: bool = False
) -> Mixes:
    """Mixes of at least one device and at most `max_devices`.

    In every number of nodes if these are not too many, else in fewer, down to none and all; where even
    those are too many, nodes one after the other by their speed and by what that costs. With `coarse` powers
    of two at the finest. Where `max_devices` leaves less than a node, a part of one of any kind.
    """
    most = inf if max_devices is None else max_devices
    limits = [min(len(kind.nodes), int(min(most, 1e9)) // len(kind.types)) for kind in kinds]
    num_nodes = _make_grid(limits, coarse)
    if num_nodes is None:
        num_nodes = np.array([*dict.fromkeys(_add_in_turn(kinds, bounds))], dtype=np.int64)
    parts = np.full(len(num_nodes), -1, dtype=np.int64), np.zeros(len(num_nodes), dtype=np.int64)
    whole = Mixes(tuple(kinds), bounds, num_nodes, *parts)
    if max_devices is not None:
        whole = _fill(whole, max_devices)
    kept = (whole.num_devices > 0) & (whole.num_devices <= most)
    return Mixes(whole.kinds, bounds, whole.num_nodes[kept], whole.part_kind[kept], whole.part_devices[kept])


def _fill(whole: Mixes, max_devices: int) -> Mixes:
    """Beside them the same with a part of a node of each kind, up to so many devices."""
    nodes, parts, sizes = [whole.num_nodes], [whole.part_kind], [whole.part_devices]
    left = max_devices - whole.num_devices
    for k, kind in enumerate(whole.kinds):
        at = (left > 0) & (left < len(kind.types)) & (whole.num_nodes[:, k] < len(kind.nodes))
        nodes.append(whole.num_nodes[at])
        parts.append(np.full(int(at.sum()), k, dtype=np.int64))
        sizes.append(left[at])
    return Mixes(
        whole.kinds, whole.bounds, np.concatenate(nodes), np.concatenate(parts), np.concatenate(sizes)
    )


def _make_grid(limits: Sequence[int], coarse: bool) -> Ints | None:
    """Numbers of nodes of each kind up to its limit, as finely as there is room for; None: no room."""
    for levels in _FINENESS[_POWERS if coarse else 0 :]:
        axes = [levels(limit) for limit in limits]
        if prod(map(len, axes)) <= MAX_MIXES:
            grid = np.meshgrid(*(np.array(axis, dtype=np.int64) for axis in axes), indexing="ij")
            found: Ints = np.stack([axis.ravel() for axis in grid], axis=1)
            return found
    return None


def _some(limit: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    steps = [1 << i for i in range(limit.bit_length())]
    return sorted(
        {0, limit, *(s for s in steps if s <= limit), *(s * 3 // 2 for s in steps if 1 < s * 3 // 2 <= limit)}
    )


def _powers(limit: int) -> list[int]:
    return sorted({0, limit, *(1 << i for i in range(limit.bit_length()))})


_FINENESS: tuple[Callable[[int], list[int]], ...] = (
    lambda limit: list(range(limit + 1)),
    _some,
    _powers,
    lambda limit: sorted({0, min(1, limit), limit}),
    lambda limit: sorted({0, limit}),
)
_POWERS = 2
"""From where on they are powers of two at the finest."""


def _add_in_turn(kinds: Sequence[NodeKind], bounds: DeviceBounds) -> Iterator[tuple[int, ...]]:
    """More and more nodes, the fastest first, and those that are fastest for their price."""
    speeds = [sum(1 / bounds.model_s(device) for device in kind.types) for kind in kinds]
    worth = [
        s / kind.price_per_hour if kind.price_per_hour else inf for s, kind in zip(speeds, kinds, strict=True)
    ]
    for keys in (speeds, worth):
        taken = [0] * len(kinds)
        for k in sorted(range(len(kinds)), key=keys.__getitem__, reverse=True):
            for _ in kinds[k].nodes:
                taken[k] += 1
                yield tuple(taken)
