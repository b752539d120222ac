"""Groups by merging what is joined fastest: the opposite way to SPLIT, which peels single devices off.

The degree of a device grows with the number of devices and the cut of a region with its square, so the
minimum cuts of a large cluster seldom follow its rooms and machines. Merging does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zorselike.planner.groups.bandwidths import Bandwidths, Partition, Rates, sort_groups

MAX_DEVICES_ALONE = 128
"""With more devices merging starts from whole blocks."""


def merge_by_bandwidth(bandwidths: Bandwidths, max_groups: int) -> Iterator[Partition]:
    """Nested partitions, one for every number of groups from `max_groups` down to the least there can be.

    The two groups merge whose slowest link is fastest (complete linkage). Among equals, two of the same
    device types go first, then those that are smallest together, then the first.
    """
    groups, rates = _start(bandwidths)
    types = [frozenset(bandwidths.blocks[bandwidths.block_of[d]].type for d in group) for group in groups]
    while True:
        if len(groups) <= max_groups:
            yield sort_groups(groups)
        if not rates.any():
            return
        a, b = _choose(rates, types, np.array([len(group) for group in groups]))
        groups[a] += groups[b]
        types[a] |= types[b]
        rates[a] = rates[:, a] = np.minimum(rates[a], rates[b])
        rates[a, a] = 0.0
        del groups[b], types[b]
        rates = np.delete(np.delete(rates, b, axis=0), b, axis=1)


def _start(bandwidths: Bandwidths) -> tuple[list[list[int]], Rates]:
    """Devices or blocks on their own, and the rates between them with a diagonal of 0."""
    if len(bandwidths.devices) <= MAX_DEVICES_ALONE:
        groups = [[device] for device in bandwidths.devices]
    else:
        groups = [list(block.devices) for block in bandwidths.blocks]
    rows = [bandwidths.block_of[group[0]] for group in groups]
    rates: Rates = bandwidths.group_rates[np.ix_(rows, rows)]
    np.fill_diagonal(rates, 0.0)
    return groups, rates


def _choose(rates: Rates, types: list[frozenset[str]], sizes: np.ndarray) -> tuple[int, int]:
    """The two groups to merge, the lower index first."""
    pairs = rates == rates.max()
    numbers = {type_set: i for i, type_set in enumerate(dict.fromkeys(types))}
    kinds = np.array([numbers[type_set] for type_set in types])
    alike = pairs & (kinds[:, None] == kinds)
    pairs = alike if alike.any() else pairs
    together = np.where(pairs, sizes[:, None] + sizes, np.iinfo(np.int64).max)
    a, b = np.unravel_index(np.argmin(together), together.shape)
    return int(a), int(b)
