from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorselike.plan import Microbatch, PlanError, expand_shares
from zorselike.plan.shares import apportion, cut_in_proportion


def test_one_rank_is_cut_with_a_smaller_last_microbatch():
    assert expand_shares([(3, 9, 5)], 9) == (Microbatch(3, 0, 5), Microbatch(3, 5, 9))


def test_equal_ranks_take_turns_in_list_order():
    assert expand_shares([(1, 4, 2), (0, 4, 2)], 8) == (
        Microbatch(1, 0, 2),
        Microbatch(0, 2, 4),
        Microbatch(1, 4, 6),
        Microbatch(0, 6, 8),
    )


def test_rows_are_dealt_in_order_of_time():
    # Rank 0 works through 6 rows while rank 1 works on one microbatch of 2.
    assert expand_shares([(0, 6, 2), (1, 2, 2)], 8) == (
        Microbatch(0, 0, 2),
        Microbatch(0, 2, 4),
        Microbatch(1, 4, 6),
        Microbatch(0, 6, 8),
    )


def test_a_rank_without_rows_gets_no_microbatch():
    assert expand_shares([(0, 2, 2), (1, 0, 4), (2, 0, 0)], 2) == (Microbatch(0, 0, 2),)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([(0, 4, 2), (1, 4, 2)], r"ranks 0 and 1 add up to 8, global_batch is 9; give out 1 more"),
        ([(0, 8, 2), (1, 4, 2)], r"add up to 12, global_batch is 9; take 3 away"),
        ([(0, 4, 2), (0, 5, 2)], r"rank 0 has two shares"),
        ([(0, 10, 2), (1, -1, 2)], r"rank 1 has -1 rows; give it 0 or more"),
        ([(0, 9, 0)], r"rank 0 has 0 rows per microbatch; give it 1 or more"),
        ([], r"no rank has a share, global_batch is 9; give out 9 more"),
    ],
)
def test_bad_shares_are_refused(shares, message):
    with pytest.raises(PlanError, match=message):
        expand_shares(shares, 9)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=8))
def test_shares_cover_every_row_once_in_order_of_time(pairs):
    shares = [(rank, rows, size) for rank, (rows, size) in enumerate(pairs)]
    total = sum(rows for rows, _ in pairs)
    microbatches = expand_shares(shares, total)

    assert [m.start for m in microbatches] == [0, *(m.stop for m in microbatches)][: len(microbatches)]
    assert sum(m.num_rows for m in microbatches) == total
    middles = []
    done = dict.fromkeys(range(len(pairs)), 0)
    for microbatch in microbatches:
        rows, size = pairs[microbatch.rank]
        left = rows - done[microbatch.rank]
        assert microbatch.num_rows == min(size, left)
        middles.append(Fraction(2 * done[microbatch.rank] + microbatch.num_rows, 2 * rows))
        done[microbatch.rank] += microbatch.num_rows
    assert done == {rank: rows for rank, (rows, _) in enumerate(pairs)}
    assert middles == sorted(middles)


@given(total=st.integers(0, 10**4), weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_apportioning_gives_all_and_is_off_by_less_than_one(total: int, weights: list[float]) -> None:
    given_out = apportion(total, weights)
    assert sum(given_out) == total
    for number, weight in zip(given_out, weights, strict=True):
        assert abs(number - total * weight / sum(weights)) < 1 + 1e-6


def test_what_is_left_after_rounding_goes_to_the_largest_remainder() -> None:
    assert apportion(4, [3.3, 1, 1.9]) == [2, 1, 1]  # 2.13, 0.65 and 1.23 exactly.
    assert apportion(3, [1, 1]) == [2, 1]


@given(data=st.data(), weights=st.lists(st.floats(0, 10), min_size=1, max_size=30))
def test_cuts_leave_no_piece_empty_and_miss_by_half_a_thing(
    data: st.DataObject, weights: list[float]
) -> None:
    shares = data.draw(st.lists(st.floats(0.01, 10), min_size=1, max_size=len(weights)))
    ends = cut_in_proportion(weights, shares)
    assert len(ends) == len(shares) and ends[-1] == len(weights)
    assert all(start < end for start, end in zip([0, *ends], ends, strict=False))
    equal = cut_in_proportion([1.0] * 12, [1, 2, 1])
    assert equal == [3, 9, 12]
