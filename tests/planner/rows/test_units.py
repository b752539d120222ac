"""Rows of large batches in units: every row once, and hardly slower than row by row."""

from __future__ import annotations

from batch_splits import check
from hypothesis import given
from hypothesis import strategies as st

from zorselike.planner.rows.share_rows import RankCosts, share_once
from zorselike.planner.rows.units import LEAST_AT_ONCE, LEAST_OF_A_RANK, LEAST_UNITS, find_unit, to_rows

SECONDS = st.tuples(st.floats(0.0, 2.0), st.floats(0.05, 1.0))
"""Of a microbatch, and of each of its rows."""


@given(
    st.integers(1, 2**24),
    st.lists(st.integers(0, 2**16), min_size=1, max_size=300),
    st.one_of(st.none(), st.integers(1, 5000)),
)
def test_units_are_as_many_and_as_fine_as_they_must_be(num_rows, at_once, fixed):
    most_rows = min(num_rows, fixed or num_rows)
    unit = find_unit(num_rows, at_once, most_rows)
    if unit > 1:
        assert num_rows // unit >= max(LEAST_UNITS, LEAST_OF_A_RANK * len(at_once))
        assert all(rows // unit >= LEAST_AT_ONCE for rows in at_once if rows)
        assert most_rows == num_rows or most_rows % unit == 0


@given(st.lists(st.tuples(SECONDS, st.integers(40, 90)), min_size=1, max_size=4), st.integers(1500, 2500))
def test_what_is_shared_in_units_takes_little_longer(ranks, num_rows):
    costs = [
        RankCosts(i, tuple(each + rows * per_row for rows in range(1, most + 1)))
        for i, ((each, per_row), most) in enumerate(ranks)
    ]
    unit = 4
    coarse = [RankCosts(cost.rank, cost.seconds[unit - 1 :: unit]) for cost in costs]
    shares = to_rows(share_once(coarse, -(-num_rows // unit)), unit, num_rows)
    check(shares, costs, num_rows)

    def slowest_s(found: tuple[tuple[int, ...], ...]) -> float:
        return max(
            sum(cost.seconds[rows - 1] for rows in sizes) for cost, sizes in zip(costs, found, strict=True)
        )

    exact = slowest_s(share_once(costs, num_rows))
    # At most a unit more on the slowest, in microbatches that are less than a unit smaller than may be.
    each_unit = max(cost.seconds[unit - 1] for cost in costs)
    least = min(len(cost.seconds) for cost in costs)
    assert slowest_s(shares) <= (exact + 2 * each_unit) * least / (least - unit + 1)


def test_rows_that_make_no_whole_unit_are_left_out_of_the_smallest_microbatch():
    assert to_rows([(), (3, 2), (4,)], 8, 67) == ((), (24, 11), (32,))
