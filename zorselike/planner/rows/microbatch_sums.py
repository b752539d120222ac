"""The cheapest way to compute so many rows in microbatches of any sizes that fit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ROUND_OFF = 1e-12
"""Times that differ by less, relative to them, are equal: sums of the same numbers in another order."""


@lru_cache(maxsize=1024)
def sum_microbatches(seconds: tuple[float, ...], num_rows: int) -> tuple[float, ...]:
    """The least seconds for 0, 1, ... `num_rows` rows; infinite where not one row fits.

    Args:
        seconds: of a microbatch of 1, 2, ... rows, as many as fit at once; they do not fall. Then neither
            do the sums, in floating point too: a row can be left out of any sum that contains it.
    """
    each, least = np.array(seconds[:num_rows]), np.zeros(num_rows + 1)
    sizes = np.arange(1, len(each) + 1)
    for n in range(1, num_rows + 1):
        size = min(len(each), n)
        # each[0] + least[n - 1], each[1] + least[n - 2], ...
        least[n] = (each[:size] + least[n - size : n][::-1]).min(initial=np.inf)
        if len(each) and not n % len(each) and repeat(least, n, sizes, each):
            break
    return tuple(least.tolist())


def repeat(
    least: NDArray[np.float64], last: int, rows: NDArray[np.int64], costs: NDArray[np.float64]
) -> bool:
    """Fills in what is least for more rows than `last` once each is what is least for fewer and the cheapest
    part for its rows once more: where that holds for as many in a row as the largest part has, it always
    does. False where it does not yet.

    Args:
        rows, costs: of each part; many of them make up all rows.
    """
    best = len(rows) - 1 - int(np.argmin((costs / rows)[::-1]))
    period, cost, window = int(rows[best]), costs[best], int(rows.max())
    if last < window + period or last + 1 == len(least):
        return False
    recent = slice(last + 1 - window, last + 1)
    once_more = least[recent.start - period : recent.stop - period] + cost
    if not (once_more <= least[recent] * (1 + ROUND_OFF)).all():
        return False
    number = -(-(len(least) - last - 1) // period)
    table = np.full((number + 1, period), cost)
    table[0] = least[last + 1 - period : last + 1]
    least[last + 1 :] = np.add.accumulate(table)[1:].reshape(-1)[: len(least) - last - 1]
    np.maximum.accumulate(least, out=least)  # Sums of the same numbers in another order may be less.
    return True


def pick_sizes(seconds: Sequence[float], least: Sequence[float], num_rows: int) -> tuple[int, ...]:
    """Microbatch sizes that take `least[num_rows]`, the largest first; of equally good ones the largest."""
    sizes = []
    left = num_rows
    while left:
        bound = least[left] * (1 + ROUND_OFF)
        sizes.append(
            next(
                size
                for size in range(min(len(seconds), left), 0, -1)
                if seconds[size - 1] + least[left - size] <= bound
            )
        )
        left -= sizes[-1]
    return tuple(sorted(sizes, reverse=True))
