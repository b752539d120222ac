from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorselike.plan import Microbatch, PlanError, expand_shares


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
