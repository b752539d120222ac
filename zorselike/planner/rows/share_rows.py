"""Rows to ranks: who of a group computes how many, and in microbatches of which sizes (Poplar, Algorithm 2).

Two cases. Where a group's collectives come once a step, every rank goes through its own microbatches and the
slowest rank counts. Where they come with each microbatch (ZeRO 3, or `grad_reduce = "microbatch"`), the ranks
wait for each other each time, and the slowest microbatch of each round counts. Both are solved
exactly.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from zorselike.errors import PlanError, ProfileError
from zorselike.planner.candidate.candidate import Sizes
from zorselike.planner.rows.capped_rounds import cover, fill_rounds
from zorselike.planner.rows.microbatch_sums import ROUND_OFF, pick_sizes, repeat, sum_microbatches
from zorselike.text.wording import list_few

MOST_KEPT = 4096
_SOUND: dict[int, tuple[float, ...]] = {}
"""Seconds without fault, by identity: thousands of ranks have the very same, of thousands of rows."""


@dataclass(frozen=True)
class RankCosts:
    """A rank and what a microbatch takes on it."""

    rank: int
    seconds: tuple[float, ...]
    """Forward and backward of a microbatch of 1, 2, ... rows through all layers of the group, for as many
    rows as fit at once; empty where not one row fits. They do not fall."""
    most_rows: int | None = None
    """Rows of a step for which it has room where activations of all its microbatches are kept; None: any. The
    paper's ways do not heed it."""

    def __post_init__(self) -> None:
        """Raises `ProfileError` for seconds that are negative, not finite, or fall."""
        if _SOUND.get(id(self.seconds)) is self.seconds:
            return
        if fault := _find_fault(self.seconds):
            raise ProfileError(f"rank {self.rank}: {fault}")
        if len(_SOUND) >= MOST_KEPT:
            _SOUND.clear()
        _SOUND[id(self.seconds)] = self.seconds

    @property
    def max_rows(self) -> int:
        """Rows that fit at once."""
        return len(self.seconds)


def _find_fault(seconds: tuple[float, ...]) -> str:
    """What is wrong with a rank's seconds."""
    if not all(math.isfinite(value) and value >= 0 for value in seconds):
        return "a microbatch's time is negative or not finite"
    if any(more < fewer for fewer, more in pairwise(seconds)):
        return (
            "a larger microbatch takes less time than a smaller one; take the least of each size and all "
            "larger ones"
        )
    return ""


def share_once(costs: Sequence[RankCosts], num_rows: int) -> tuple[Sizes, ...]:
    """Microbatches of each rank in processing order (none where it would only slow the others) that take the
    least time together, where collectives come once a step.

    A rank's time for n rows is its cheapest sum of microbatches; the optimum is one of the times that occur,
    found by bisection on them. Rows that the ranks could compute beyond the batch within that time are taken
    where they save most.

    Raises:
        PlanError: Not one row fits on any rank, all together have no room for so many, a rank twice, or
            fewer than one row.
    """
    check_costs(costs, num_rows)
    _check_room(costs, num_rows)
    # Ranks of a type have the very same seconds, of thousands of rows: to hash those takes long.
    own_seconds = {id(cost.seconds): cost.seconds for cost in costs}
    least = {key: sum_microbatches(seconds, num_rows) for key, seconds in own_seconds.items()}
    counts = Counter((id(cost.seconds), _room(cost, num_rows)) for cost in costs)
    times = sorted({time for sums in least.values() for time in sums if math.isfinite(time)})

    def covered(time: float) -> int:
        return sum(
            number * min(_fit_within(least[key], time), most) for (key, most), number in counts.items()
        )

    slowest = times[bisect_left(times, num_rows, key=covered)]
    tables = [least[id(cost.seconds)] for cost in costs]
    fitting = [
        min(_fit_within(table, slowest), _room(cost, num_rows))
        for cost, table in zip(costs, tables, strict=True)
    ]
    rows = take_surplus(tables, fitting, num_rows)
    picked: dict[tuple[int, int], Sizes] = {}
    """Of ranks with the very same seconds and as many rows."""
    for cost, table, own in zip(costs, tables, rows, strict=True):
        if (id(cost.seconds), own) not in picked:
            picked[id(cost.seconds), own] = pick_sizes(cost.seconds, table, own)
    return tuple(picked[id(cost.seconds), own] for cost, own in zip(costs, rows, strict=True))


def share_per_microbatch(
    costs: Sequence[RankCosts], num_rows: int, *, collective_s: float = 0.0, hidden_s: float = 0.0
) -> tuple[Sizes, ...]:
    """Likewise where collectives come with each microbatch.

    In a round of time t every rank computes the most rows that it can within t, t being one of the times
    that occur; which rounds is a dynamic programme over rows. Algorithm 2's second branch (equal rounds, the
    last one smaller and timed on its own) is one of the choices. Where ranks have room for only so many rows
    of the step, and that changes the answer, it is a search that seldom misses the best.

    Args:
        collective_s: What the collectives of one round add to its computation, in seconds.
        hidden_s: What others of the round take beside its computation (with ZeRO 3 all but the first gather
            and the last reduction): so long a round takes at least.

    Raises:
        PlanError: As `share_once`, or the collectives take less than no time.
    """
    check_costs(costs, num_rows)
    _check_room(costs, num_rows)
    for seconds in (collective_s, hidden_s):
        if not (math.isfinite(seconds) and seconds >= 0):
            raise PlanError(f"batches: the collectives of a microbatch take {seconds} s; give 0 or more")

    def cost_s(time: float) -> float:
        return max(time, hidden_s) + collective_s

    costs = [replace(cost, seconds=cost.seconds[: _room(cost, num_rows)]) for cost in costs]
    rounds = tuple(list_rounds(costs, num_rows))
    times: Sequence[float] = _mix_rounds(rounds, tuple(cost_s(time) for time, _ in rounds), num_rows)
    kinds = Counter((cost.seconds, _room(cost, num_rows)) for cost in costs)
    if cover(kinds, Counter(times)) < num_rows:
        times = fill_rounds(kinds, num_rows, cost_s)
    return share_in_rounds(costs, times, num_rows)


@lru_cache(maxsize=1024)
def _mix_rounds(
    rounds: tuple[tuple[float, int], ...], costs_s: tuple[float, ...], num_rows: int
) -> tuple[float, ...]:
    """Times of the cheapest rounds that cover the batch, by time and rows of a round, and what it costs; the
    same come again for each group of as many alike."""
    costs = np.array(costs_s)
    rows = np.array([own for _, own in rounds])
    fewest, most = int(rows[0]), int(rows[-1])
    least = np.zeros(most + num_rows + 1)
    """Seconds for 0, 1, ... rows, from position `most` on; fewer than none take nothing."""
    for first in range(most + 1, len(least), fewest):  # What these wait for comes before all of them.
        own = np.arange(first, min(first + fewest, len(least)))
        least[own] = (costs + least[own[:, None] - rows]).min(axis=1)
        if (done := int(own[-1])) >= 3 * most and repeat(least, done, rows, costs):
            break
    times: list[float] = []
    left = num_rows
    while left > 0:
        reached = costs + least[most + left - rows] <= least[most + left] * (1 + ROUND_OFF)
        longest = int(np.flatnonzero(reached)[-1])
        times.append(rounds[longest][0])
        left -= rounds[longest][1]
    return tuple(times)


# -- parts that the paper's ways share -----------------------------------------------------


def check_costs(costs: Sequence[RankCosts], num_rows: int) -> None:
    """Raises `PlanError` for what no split can be made of."""
    if num_rows < 1:
        raise PlanError(f"batches: {num_rows} rows to share; give at least 1")
    if not costs:
        raise PlanError("batches: no ranks to share rows among; give at least one")
    repeated = [rank for rank, number in Counter(cost.rank for cost in costs).items() if number > 1]
    if repeated:
        raise PlanError(f"batches: {list_few(repeated, 'rank')} given twice; give each rank once")
    if not any(cost.seconds for cost in costs):
        raise PlanError(
            f"batches: not one row fits on {list_few([cost.rank for cost in costs], 'rank')}; "
            "raise the ZeRO stage, recompute, offload, or give the group fewer layers"
        )


def list_rounds(costs: Sequence[RankCosts], num_rows: int) -> list[tuple[float, int]]:
    """Times that occur, rising, and how many rows all ranks together compute within each, up to the first
    that covers the batch."""
    counts = Counter(cost.seconds for cost in costs)
    rounds: list[tuple[float, int]] = []
    for time in sorted({time for seconds in counts for time in seconds}):
        rounds.append((time, sum(number * bisect_right(own, time) for own, number in counts.items())))
        if rounds[-1][1] >= num_rows:
            break
    return rounds


def take_surplus(tables: Sequence[Sequence[float]], rows: Sequence[int], num_rows: int) -> list[int]:
    """Rows that add up to `num_rows`, taken from larger ones where it saves most at each time.

    Args:
        tables: each rank's seconds for 0, 1, ... rows.
    """
    left = list(rows)

    def saving(i: int) -> tuple[float, int]:
        return tables[i][left[i] - 1] - tables[i][left[i]], -i

    heap = [saving(i) for i in range(len(left)) if left[i]]
    heapq.heapify(heap)
    for _ in range(sum(rows) - num_rows):
        _, negative = heapq.heappop(heap)
        left[-negative] -= 1
        if left[-negative]:
            heapq.heappush(heap, saving(-negative))
    return left


def share_in_rounds(costs: Sequence[RankCosts], times: Iterable[float], num_rows: int) -> tuple[Sizes, ...]:
    """Rounds in which every rank computes the most rows that it can within the round's time and its room,
    longest first; the last round computes what is left. A rank's j-th microbatch is in round j: a rank that
    has rows in a shorter round has some in every longer one."""
    tables = [(0.0, *cost.seconds) for cost in costs]
    sizes: list[list[int]] = [[] for _ in costs]
    left = num_rows
    for time in sorted(times, reverse=True):
        rows = [
            min(_fit_within(table, time), _room(cost, num_rows) - sum(mine))
            for cost, table, mine in zip(costs, tables, sizes, strict=True)
        ]
        rows = take_surplus(tables, rows, min(left, sum(rows)))
        left -= sum(rows)
        for taken, mine in zip(rows, sizes, strict=True):
            if taken:
                mine.append(taken)
    return tuple(map(tuple, sizes))


def _check_room(costs: Sequence[RankCosts], num_rows: int) -> None:
    """Raises `PlanError` where the ranks together have no room for the batch."""
    room = sum(_room(cost, num_rows) for cost in costs if cost.seconds)
    if room < num_rows:
        raise PlanError(
            f"batches: {list_few([cost.rank for cost in costs], 'rank')} have room for {room} of {num_rows} "
            "rows; recompute, offload, or give the group fewer layers"
        )


def _room(cost: RankCosts, num_rows: int) -> int:
    """Rows for which a rank has room in a step."""
    return num_rows if cost.most_rows is None else min(cost.most_rows, num_rows)


def _fit_within(table: Sequence[float], time: float) -> int:
    """The most rows that take no longer, by a table of seconds for 0, 1, ... rows."""
    return bisect_right(table, time) - 1
