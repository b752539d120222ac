"""SPLIT: groups by one minimum cut after another (Zorse 4.3.2), within 2 - 2/k of the minimum k-cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zorselike.planner.groups.bandwidths import Bandwidths, Partition, sort_groups
from zorselike.planner.groups.min_cut import Cut, minimum_cut


@dataclass(frozen=True)
class _Part:
    members: dict[int, tuple[int, ...]]
    """Devices by block."""
    cut: Cut | None
    """The lightest that cuts the part in two; over its blocks in the order of `members`."""

    @property
    def num_devices(self) -> int:
        return sum(map(len, self.members.values()))


def split_by_cuts(bandwidths: Bandwidths, max_groups: int) -> Iterator[Partition]:
    """One partition for every number of groups from 1 to `max_groups`, each a refinement of the last.

    Of all parts that with the lightest cut is cut, the larger of two equal. Parts that nothing joins, or
    that may not be in one group, are split first, as their cuts weigh nothing.
    """
    everything = {b: block.devices for b, block in enumerate(bandwidths.blocks)}
    parts = [_measure(bandwidths, everything)]
    while True:
        yield sort_groups([[d for own in part.members.values() for d in own] for part in parts])
        weights = {i: part.cut.weight for i, part in enumerate(parts) if part.cut}
        if len(parts) >= max_groups or not weights:
            return
        lightest = min(weights, key=lambda i: (weights[i], -parts[i].num_devices, i))
        parts[lightest : lightest + 1] = _cut(bandwidths, parts[lightest])


def _measure(bandwidths: Bandwidths, members: dict[int, tuple[int, ...]]) -> _Part:
    blocks = list(members)
    sizes = [len(own) for own in members.values()]
    if sum(sizes) < 2:
        return _Part(members, None)
    return _Part(members, minimum_cut(bandwidths.group_rates[np.ix_(blocks, blocks)], sizes))


def _cut(bandwidths: Bandwidths, part: _Part) -> list[_Part]:
    """The two sides of a part's lightest cut: of each block the last devices go to the second."""
    assert part.cut is not None
    stay: dict[int, tuple[int, ...]] = {}
    leave: dict[int, tuple[int, ...]] = {}
    for (block, devices), num_leaving in zip(part.members.items(), part.cut.side, strict=True):
        edge = len(devices) - num_leaving
        for side, kept in ((stay, devices[:edge]), (leave, devices[edge:])):
            if kept:
                side[block] = kept
    return [_measure(bandwidths, stay), _measure(bandwidths, leave)]
