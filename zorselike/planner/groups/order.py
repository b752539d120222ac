"""In which order a pipeline visits its groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from zorselike.planner.groups.bandwidths import Bandwidths, Partition
from zorselike.planner.groups.min_cut import find_twins

MAX_FEW = 8
"""Up to how many groups other orders than the paper's are looked at."""

Order = tuple[int, ...]
"""Indices of groups, first to last."""

Traits = tuple[tuple[int, int], ...]
"""Pairs of devices by what they have in common, and how many there are."""


def order_by_bandwidth(bandwidths: Bandwidths, groups: Partition) -> Order:
    """By falling bandwidth inside the group, the paper's rule (Zorse 4.3.3): the first all-gather of a step
    has nothing to hide behind. A group of one device gathers nothing and goes first."""
    rates = [bandwidths.slowest_link(group) for group in groups]
    return tuple(sorted(range(len(groups)), key=lambda i: -rates[i]))


def order_groups(bandwidths: Bandwidths, groups: Partition, *, max_orders: int = 120) -> tuple[Order, ...]:
    """The paper's order first; then every other, if the groups are few and the orders at most `max_orders`.

    Of orders that differ only in which of several interchangeable groups comes when, one is there.
    """
    first = order_by_bandwidth(bandwidths, groups)
    if len(groups) > MAX_FEW:
        return (first,)
    classes = find_interchangeable(bandwidths, groups)
    if math.factorial(len(groups)) > max_orders * math.prod(math.factorial(len(alike)) for alike in classes):
        return (first,)
    by_rule = [sorted(alike, key=first.index) for alike in classes]
    return tuple(dict.fromkeys([first, *_arrange(by_rule)]))


def find_interchangeable(bandwidths: Bandwidths, groups: Partition) -> list[list[int]]:
    """Classes of groups with the same devices, joined as well among themselves and to each other group."""
    codes = bandwidths.pair_codes
    counts = [bandwidths.count_blocks(group) for group in groups]
    numbers: dict[Traits, int] = {}
    traits = np.array(
        [[numbers.setdefault(_traits(codes, a, b), len(numbers)) for b in counts] for a in counts],
        dtype=float,
    )
    classes: list[list[int]] = []
    for twins in find_twins(traits):
        for inside in dict.fromkeys(float(traits[i, i]) for i in twins):
            classes.append([i for i in twins if traits[i, i] == inside])
    return classes


def _traits(
    codes: NDArray[np.int64], first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]
) -> Traits:
    """Traits of the pairs of a device of the first group and one of the second, itself among them."""
    rows, row_counts = np.array(first).T
    columns, column_counts = np.array(second).T
    pairs = np.outer(row_counts, column_counts)
    distinct, index = np.unique(codes[np.ix_(rows, columns)], return_inverse=True)
    totals = np.bincount(index.ravel(), weights=pairs.ravel())
    return tuple((int(code), int(total)) for code, total in zip(distinct, totals, strict=True))


def _arrange(classes: Sequence[Sequence[int]]) -> Iterator[Order]:
    """Every order in which those of a class come as the class has them."""
    if not any(classes):
        yield ()
    for i, alike in enumerate(classes):
        if alike:
            for rest in _arrange([*classes[:i], alike[1:], *classes[i + 1 :]]):
                yield (alike[0], *rest)
