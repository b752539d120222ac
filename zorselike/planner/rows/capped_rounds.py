"""Rounds of microbatches where ranks have room for only so many rows of a step."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, product
from typing import NamedTuple

from zorselike.planner.rows.microbatch_sums import ROUND_OFF

Kinds = Mapping[tuple[tuple[float, ...], int], int]
"""How many ranks there are of each kind: seconds of microbatches of 1, 2, ... rows, and the rows of a step
for which they have room."""

_NUM_TRIED = 12
"""Times that are tried with each other at first."""
_MAX_REFILLS = 20


def cover(kinds: Kinds, times: Mapping[float, int]) -> int:
    """Rows that all ranks together compute in rounds, so many of each time."""
    return sum(
        count * min(room, sum(number * bisect_right(seconds, time) for time, number in times.items()))
        for (seconds, room), count in kinds.items()
    )


def fill_rounds(kinds: Kinds, num_rows: int, cost_s: Callable[[float], float]) -> list[float]:
    """Times of rounds that cover the batch together, about as cheap as can be.

    Where no rank's room is in question, rounds of many times can be mixed by a dynamic programme over rows;
    here what a round adds depends on those before it. The cheapest rounds of two times come first; then one
    round or two are taken away and what they leave is filled anew, for as long as that helps.

    Args:
        kinds: all of them together have room for the batch.
        cost_s: of a round of some time; it does not fall with the time.
    """
    times = sorted({time for seconds, _ in kinds for time in seconds})
    batch = _Batch(kinds, num_rows, times, [cost_s(time) for time in times])
    best = batch.fill((), math.inf)
    assert best is not None, "the ranks have room for the batch"
    for _ in range(_MAX_REFILLS):
        found = None
        for taken in _list_taken(best):
            kept = list((Counter(best) - Counter(taken)).elements())
            filled = batch.fill(kept, sum(map(cost_s, taken)) * (1 - ROUND_OFF))
            if filled is not None:
                found = min(found or best, kept + filled, key=lambda rounds: sum(map(cost_s, rounds)))
        if found is None:
            break
        best = found
    return best


def _list_taken(rounds: Sequence[float]) -> list[tuple[float, ...]]:
    """One round of each time, and two."""
    times = sorted({*rounds})
    pairs = [pair for pair in combinations_with_replacement(times, 2) if not Counter(pair) - Counter(rounds)]
    return [*((time,) for time in times), *pairs]


class _Mix(NamedTuple):
    """Rounds of two times."""

    total_s: float
    a: int
    """Position of the time."""
    b: int
    num_a: int
    num_b: int


@dataclass(frozen=True)
class _Batch:
    """What is to be covered."""

    kinds: Kinds
    num_rows: int
    times: Sequence[float]
    costs_s: Sequence[float]
    """What a round of each time costs."""

    def fill(self, before: Sequence[float], limit_s: float) -> list[float] | None:
        """The cheapest rounds of two times that cover what others leave, None where they cost as much as the
        limit. Of many times a few are tried with each other, then those beside the best."""
        num_times = len(self.times)
        ranks = [
            (count, room, sum(bisect_right(seconds, time) for time in before))
            for (seconds, room), count in self.kinds.items()
        ]
        best = _Mix(limit_s, 0, 0, 0, 0)
        stride = max(1, num_times // _NUM_TRIED)
        tried = range(num_times - 1, -1, -stride)
        for a, b in product(tried, tried):
            if a >= b:
                best = min(best, self._mix(ranks, a, b, best.total_s))
        while stride > 1 and best.total_s < limit_s:
            stride //= 2
            around = (-stride, 0, stride)
            near = [[i + step for step in around if 0 <= i + step < num_times] for i in (best.a, best.b)]
            for a, b in product(*near):
                best = min(best, self._mix(ranks, a, b, best.total_s))
        if best.total_s >= limit_s:
            return None
        return [self.times[best.a]] * best.num_a + [self.times[best.b]] * best.num_b

    @cached_property
    def _fits(self) -> list[list[int]]:
        """Rows of a rank of each kind within each time."""
        return [[bisect_right(seconds, time) for seconds, _ in self.kinds] for time in self.times]

    def _mix(self, ranks: Sequence[tuple[int, int, int]], a: int, b: int, limit_s: float) -> _Mix:
        """The cheapest numbers of rounds of two times; with more of one there are fewer of the other.

        Args:
            ranks: of each kind how many, a rank's room, and what is in it.
        """
        fits = [(*own, *two) for own, *two in zip(ranks, self._fits[a], self._fits[b], strict=True)]

        def is_covered(num_a: int, num_b: int) -> bool:
            return self.num_rows <= sum(
                count * min(room, filled + num_a * in_a + num_b * in_b)
                for count, room, filled, in_a, in_b in fits
            )

        best = _Mix(math.inf, a, b, 0, 0)
        cost_a, cost_b = self.costs_s[a], self.costs_s[b]
        most = self.num_rows
        if limit_s < most * cost_b:
            most = int(limit_s / cost_b) + 1
        num_b = bisect_left(range(most + 1), True, key=lambda number: is_covered(0, number))
        for num_a in range(self.num_rows + 1):
            if num_a * cost_a > min(limit_s, best.total_s):
                break
            while num_b > 0 and is_covered(num_a, num_b - 1):
                num_b -= 1
            if num_b <= most:
                best = min(best, _Mix(num_a * cost_a + num_b * cost_b, a, b, num_a, num_b))
            if num_b == 0:
                break
        return best
