"""Shares: rows per rank, the shorthand in which a person says who computes how much; and what is given out
in proportion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate

from zorselike.errors import PlanError
from zorselike.plan.parts import Microbatch
from zorselike.text.wording import list_few


def expand_shares(shares: Sequence[tuple[int, int, int]], global_batch: int) -> tuple[Microbatch, ...]:
    """The microbatches that a group's shares stand for, in processing order.

    Rows are dealt in order of time, on the assumption that all ranks of the group start and
    finish together, that is, that a rank with n rows takes 1/n of that time for each. So the
    first rows of the batch are computed first in every group whatever its shape, and a
    microbatch waits only for rows that its neighbours computed at about the same time. Where
    two microbatches overlap in time, the one whose middle comes first has the lower rows: by
    its start alone it would be late as a source, by its end alone early as a target.

    Args:
        shares: `(rank, rows, rows_per_microbatch)` per rank. A rank's last microbatch is
            smaller if its rows do not divide. With 0 rows a rank gets no microbatch.
        global_batch: rows per step, which the shares' rows must add up to.

    Raises:
        PlanError: A number out of range, a rank twice, or rows that do not add up.
    """
    seen: set[int] = set()
    for rank, rows, rows_per_microbatch in shares:
        if rank in seen:
            raise PlanError(f"shares: rank {rank} has two shares; give it one")
        seen.add(rank)
        if rows < 0:
            raise PlanError(f"shares: rank {rank} has {rows} rows; give it 0 or more")
        if rows_per_microbatch < 1 and rows > 0:
            raise PlanError(
                f"shares: rank {rank} has {rows_per_microbatch} rows per microbatch; give it 1 or more"
            )
    total = sum(rows for _, rows, _ in shares)
    if total != global_batch:
        difference = abs(total - global_batch)
        mend = f"give out {difference} more" if total < global_batch else f"take {difference} away"
        givers = (
            f"the rows of {list_few(sorted(seen), 'rank')} add up to {total}"
            if seen
            else "no rank has a share"
        )
        raise PlanError(f"shares: {givers}, global_batch is {global_batch}; {mend}")

    # A rank without rows may well say 0 rows per microbatch, a step that range() refuses.
    return deal_rows(
        (Fraction(start + stop, 2 * rows), rank, stop - start)
        for rank, rows, rows_per_microbatch in shares
        for start in range(0, rows, max(1, rows_per_microbatch))
        for stop in [min(start + rows_per_microbatch, rows)]
    )


def deal_rows(pieces: Iterable[tuple[Fraction | float, int, int]]) -> tuple[Microbatch, ...]:
    """Microbatches in the order of their times, the first rows of the batch to the first.

    Args:
        pieces: `(time, rank, rows)` of each microbatch, sizes as they come: when its middle is computed, on
            any clock that all ranks share. Of those at the same time the one given first comes first.
    """
    microbatches = []
    row = 0
    for _, rank, num_rows in sorted(pieces, key=lambda piece: piece[0]):
        microbatches.append(Microbatch(rank, row, row + num_rows))
        row += num_rows
    return tuple(microbatches)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `total`, in proportion to positive weights: what is left after rounding
    down goes to the largest remainders (Hamilton's method), among equals to the first."""
    exact = [total * weight / sum(weights) for weight in weights]
    given = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: given[i] - exact[i])
    for i in by_remainder[: total - sum(given)]:
        given[i] += 1
    return given


def cut_in_proportion(weights: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Where to cut a row of things so that piece `i` has about `shares[i]` of the weight and none is empty:
    the end of each piece. There are at least as many things as pieces."""
    edges = [0.0, *accumulate(weights)]
    wanted = list(accumulate(shares))
    ends: list[int] = []
    for piece, reached in enumerate(wanted):
        least = (ends[-1] if ends else 0) + 1
        most = len(weights) - (len(shares) - 1 - piece)
        target = edges[-1] * reached / wanted[-1]
        ends.append(min(range(least, most + 1), key=lambda end: abs(edges[end] - target)))
    ends[-1] = len(weights)
    return ends
