"""Rows of large batches in units of several: tables over rows would take longer than all else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zorselike.planner.candidate.candidate import Sizes

LEAST_UNITS, LEAST_OF_A_RANK = 2048, 256
"""Units of a batch at least, and for each rank: of fewer than twice as many rows each is shared out."""
LEAST_AT_ONCE = 8
"""Units of a microbatch at least, of what fits at once: so finely sizes can be chosen still."""


def find_unit(num_rows: int, at_once: Sequence[int], most_rows: int) -> int:
    """Rows of a unit: a power of two, as batches are multiples of one.

    Args:
        at_once: the most rows of a microbatch on each rank; those on which not one fits do not count.
        most_rows: what was asked for as the rows of a microbatch, which units divide; of the whole batch
            where nothing was.
    """
    fewest = min((rows for rows in at_once if rows), default=1)
    num_units = max(LEAST_UNITS, LEAST_OF_A_RANK * len(at_once))
    most = min(num_rows // num_units, fewest // LEAST_AT_ONCE)
    unit = 1 << max(0, most.bit_length() - 1)
    return unit if most_rows >= num_rows else math.gcd(unit, most_rows)


def to_rows(shares: Sequence[Sizes], unit: int, num_rows: int) -> tuple[Sizes, ...]:
    """Rows of microbatches that have so many units. What the last unit is short of is taken from the smallest
    microbatch of the first rank that has any."""
    found = [tuple(size * unit for size in sizes) for sizes in shares]
    short = sum(map(sum, found)) - num_rows
    if short:
        rank = next(i for i, sizes in enumerate(found) if sizes)
        found[rank] = (*found[rank][:-1], found[rank][-1] - short)
    return tuple(found)
