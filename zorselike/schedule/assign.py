"""Which rank of the next group computes which rows (Zorse, section 4.2).

The earlier group's microbatches complete one by one; each goes to the rank of the later group
that has the most compute time left, so that no rank of the later group runs dry while another
still has work in front of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zorselike.errors import PlanError
from zorselike.plan.plan import Microbatch


class _Remaining(NamedTuple):
    """A rank of the later group; the smallest in a heap has the most seconds left."""

    negative_remaining_s: float
    rank: int
    num_rows: int
    """Rows given to it so far."""


def assign_microbatches(
    earlier: Sequence[Microbatch],
    earlier_seconds_per_row: Mapping[int, float],
    later_seconds_per_row: Mapping[int, float],
    *,
    max_rows: Mapping[int, int] | None = None,
) -> tuple[Microbatch, ...]:
    """Gives the rows of one group to the ranks of the next, in the order in which they complete.

    Every rank of the later group starts with the compute time of its proportional share of all
    rows; a microbatch goes to the rank with the most time left (ties to the lowest rank), whose
    time it then takes. The loads end balanced to within one microbatch.

    Args:
        earlier: the earlier group's microbatches in processing order; a rank runs its own one
            after another.
        earlier_seconds_per_row: seconds per row of each rank that occurs in `earlier`; only
            their ratios matter.
        later_seconds_per_row: the same for each rank of the later group that shall compute;
            leave out a rank that only holds shards.
        max_rows: the most rows that a rank of the later group can compute at once. A larger
            microbatch is cut into even pieces, and each piece is assigned by itself.

    Returns:
        The later group's microbatches in processing order, usable as `Group.microbatches`.

    Raises:
        PlanError: a rank's seconds are missing or not positive, its limit is below one row, or
            no rank is left to compute the rows.

    Source: Zorse, section 4.2, "Cross-stage Communication Algorithm".
    """
    limits = dict(max_rows or {})
    _refuse_bad_seconds(earlier_seconds_per_row, "earlier_seconds_per_row")
    _refuse_bad_seconds(later_seconds_per_row, "later_seconds_per_row")
    for rank, limit in limits.items():
        if limit < 1:
            raise PlanError(
                f"max_rows[{rank}] is {limit}: give at least 1, or leave the rank out of the group"
            )
    if earlier and not later_seconds_per_row:
        raise PlanError("later_seconds_per_row is empty: name at least one rank that computes the rows")

    num_rows = sum(microbatch.num_rows for microbatch in earlier)
    share_s = num_rows / sum(1.0 / seconds for seconds in later_seconds_per_row.values()) if num_rows else 0.0
    # A proportional share takes every rank the same time, so all start with `share_s`.
    heap = [_Remaining(-share_s, rank, 0) for rank in sorted(later_seconds_per_row)]
    later: list[Microbatch] = []
    for microbatch in _by_completion(earlier, earlier_seconds_per_row):
        start = microbatch.start
        while start < microbatch.stop:
            _, rank, given = heapq.heappop(heap)
            stop = start + _piece(microbatch.stop - start, limits.get(rank))
            later.append(Microbatch(rank, start, stop))
            given += stop - start
            # From whole rows and not by repeated subtraction, so that equal loads compare equal.
            remaining_s = share_s - given * later_seconds_per_row[rank]
            heapq.heappush(heap, _Remaining(-remaining_s, rank, given))
            start = stop
    return tuple(later)


def completion_times(
    microbatches: Sequence[Microbatch], seconds_per_row: Mapping[int, float]
) -> tuple[float, ...]:
    """When each microbatch is done, in seconds, if every rank runs its own one after another."""
    clock_s: dict[int, float] = {}
    done_s: list[float] = []
    for microbatch in microbatches:
        rank = microbatch.rank
        if rank not in seconds_per_row:
            raise PlanError(f"no seconds per row given for rank {rank}, which computes rows: add it")
        clock_s[rank] = clock_s.get(rank, 0.0) + microbatch.num_rows * seconds_per_row[rank]
        done_s.append(clock_s[rank])
    return tuple(done_s)


def _by_completion(
    microbatches: Sequence[Microbatch], seconds_per_row: Mapping[int, float]
) -> list[Microbatch]:
    done_s = completion_times(microbatches, seconds_per_row)
    order = sorted(range(len(microbatches)), key=lambda i: (done_s[i], i))
    return [microbatches[i] for i in order]


def _piece(num_rows: int, limit: int | None) -> int:
    """Rows of the next piece: as few pieces as the limit allows, as even as can be."""
    if limit is None or num_rows <= limit:
        return num_rows
    return math.ceil(num_rows / math.ceil(num_rows / limit))


def _refuse_bad_seconds(seconds_per_row: Mapping[int, float], name: str) -> None:
    for rank, seconds in seconds_per_row.items():
        if not (math.isfinite(seconds) and seconds > 0):
            raise PlanError(f"{name}[{rank}] is {seconds}: give a positive, finite number of seconds")
