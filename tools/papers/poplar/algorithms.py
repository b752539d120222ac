"""Poplar's two algorithms, printed slips corrected: the ZeRO stage at which a row fits (Algorithm 1), and
rows to ranks (Algorithm 2), the baseline of `planner/rows/share_rows.py`.

Algorithm 2, first branch (ZeRO 0 and 1): as printed, the card with the least `u_i` takes the next row, where
the text and Eqs. 2 and 3 mean the most under-used one; line 9 divides a time by a speed; line 12 adds up B,
which is empty, where the rows given so far are meant. With `u_i = (T - t_i) * speed_i`, the rows that a card
could still compute, what remains goes out by Hamilton's method. Second branch (ZeRO 2 and 3): as printed, the
number of rounds is not whole and the last one takes as long as the others; here it is rounded up and the last
timed by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zorselike.errors import PlanError, ProfileError
from zorselike.plan.shares import apportion
from zorselike.planner.candidate.candidate import Sizes
from zorselike.planner.rows.share_rows import RankCosts, check_costs, list_rounds, share_in_rounds


def raise_zero(max_rows: Mapping[int, Sequence[int]]) -> int:
    """The first stage at which one row fits on every card; where there is none, the first of
    those at which it fits on most (the other cards then hold shards only).

    Args:
        max_rows: for each ZeRO stage in question, the rows that fit at once on each card of the group.

    Raises:
        PlanError: A row fits on no card at any stage.
    """
    stages = sorted(max_rows)
    fits = {stage: sum(rows >= 1 for rows in max_rows[stage]) for stage in stages}
    if not any(fits.values()):
        raise PlanError(
            f"batches: not one row fits on any card at ZeRO {', '.join(map(str, stages))}; recompute, "
            "offload, or give the group fewer layers"
        )
    return max(stages, key=lambda stage: (fits[stage], -stage))


def share_in_proportion(costs: Sequence[RankCosts], num_rows: int) -> tuple[Sizes, ...]:
    """Rows in proportion to each card's greatest speed and the remainder to the most under-used; each card
    computes them in microbatches of the size at which it is fastest, the last one smaller.

    Raises:
        PlanError: As `rows.share_rows.share_once`.
        ProfileError: A microbatch takes no time.
    """
    check_costs(costs, num_rows)
    best = [_fastest_size(cost) for cost in costs]
    usable = [i for i, size in enumerate(best) if size]
    rows = [0] * len(costs)
    speeds = [best[i] / costs[i].seconds[best[i] - 1] for i in usable]
    for i, own in zip(usable, apportion(num_rows, speeds), strict=True):
        rows[i] = own
    return tuple(
        (size,) * (own // size) + ((own % size,) if own % size else ()) if own else ()
        for own, size in zip(rows, best, strict=True)
    )


def share_in_equal_rounds(
    costs: Sequence[RankCosts], num_rows: int, *, collective_s: float = 0.0
) -> tuple[Sizes, ...]:
    """All rounds are equal but the last; in each, every card computes the most that it can in the round's
    time, the best of those that occur. Raises as `rows.share_rows.share_once`."""
    check_costs(costs, num_rows)
    rounds = list_rounds(costs, num_rows)

    def total_s(time: float, rows: int) -> float:
        num_full, rest = divmod(num_rows, rows)
        last_s = next(t for t, covered in rounds if covered >= rest) + collective_s if rest else 0.0
        return num_full * (time + collective_s) + last_s

    time, rows = min(rounds, key=lambda each: total_s(*each))
    num_full, rest = divmod(num_rows, rows)
    last = [next(t for t, covered in rounds if covered >= rest)] if rest else []
    costs = [replace(cost, most_rows=None) for cost in costs]
    return share_in_rounds(costs, [time] * num_full + last, num_rows)


def _fastest_size(cost: RankCosts) -> int:
    """Rows of the microbatch with most rows per second, the largest of equals; 0 where none fits."""
    if cost.seconds and cost.seconds[0] <= 0:
        raise ProfileError(f"rank {cost.rank}: a row takes no time; measure it again")
    return max(range(1, cost.max_rows + 1), key=lambda rows: (rows / cost.seconds[rows - 1], rows), default=0)
