"""Random cards to split rows among, and what every split has to meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import strategies as st

from zorselike.planner.candidate.candidate import Sizes
from zorselike.planner.rows.share_rows import RankCosts

RISING = st.lists(st.integers(0, 20), min_size=0, max_size=4).map(
    lambda steps: tuple(0.1 + 0.1 * own for own in accumulate(steps))
)
"""Seconds of microbatches of 1, 2, ... rows: any that do not fall; none where not one row fits."""


REFUSED = (
    ([RankCosts(0, ()), RankCosts(1, ())], 4, "not one row fits on ranks 0 and 1"),
    ([], 4, "no ranks to share rows among"),
    ([RankCosts(3, (1.0,)), RankCosts(3, (1.0,))], 4, "rank 3 given twice"),
    ([RankCosts(0, (1.0,))], 0, "0 rows to share"),
)
"""Costs and rows that no split can be made of, and what says so."""


@st.composite
def cost_lists(draw: st.DrawFn) -> list[RankCosts]:
    """Up to three cards, some of them alike; one row fits on at least one."""
    curves = draw(st.lists(RISING, min_size=1, max_size=3).filter(any))
    return [RankCosts(rank, seconds) for rank, seconds in enumerate(curves)]


@st.composite
def larger_lists(draw: st.DrawFn) -> list[RankCosts]:
    """As measured: a start, then about proportional, with bumps; up to 24 cards of three types."""
    types = []
    for _ in range(draw(st.integers(1, 3))):
        start, slope = draw(st.floats(0, 2)), draw(st.floats(0.1, 5))
        bumps = draw(st.lists(st.floats(0, 0.3), min_size=1, max_size=16))
        types.append(
            tuple(accumulate((slope * (n + start + bump) for n, bump in enumerate(bumps, start=1)), max))
        )
    return [
        RankCosts(rank, draw(st.sampled_from(types)))
        for rank in draw(st.lists(st.integers(0, 99), min_size=1, max_size=24, unique=True))
    ]


def check(
    split: Sequence[Sizes], costs: Sequence[RankCosts], num_rows: int, *, heeds_room: bool = True
) -> None:
    """Rows add up, within what fits."""
    assert sum(map(sum, split)) == num_rows
    for cost, own in zip(costs, split, strict=True):
        assert all(1 <= size <= cost.max_rows for size in own)
        if heeds_room and cost.most_rows is not None:
            assert sum(own) <= cost.most_rows


def busiest_s(split: Sequence[Sizes], costs: Sequence[RankCosts]) -> float:
    """Every rank goes through its own microbatches."""
    return max(sum(cost.seconds[size - 1] for size in own) for cost, own in zip(costs, split, strict=True))


def rounds_s(
    split: Sequence[Sizes], costs: Sequence[RankCosts], collective_s: float = 0.0, hidden_s: float = 0.0
) -> float:
    """The j-th microbatches of all ranks run together, as the schedule has them."""
    slowest = [
        max(cost.seconds[own[j] - 1] for cost, own in zip(costs, split, strict=True) if j < len(own))
        for j in range(max(map(len, split)))
    ]
    return sum(collective_s + max(time, hidden_s) for time in slowest)


def line(each: float, max_rows: int, *, start: float = 0.0) -> tuple[float, ...]:
    return tuple(start + each * rows for rows in range(1, max_rows + 1))
