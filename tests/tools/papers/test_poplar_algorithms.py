"""Poplar's own ways to deal rows: never faster than ours, and as the corrected algorithms have them."""

from __future__ import annotations

import pytest
from batch_splits import REFUSED, busiest_s, check, cost_lists, larger_lists, line, rounds_s
from hypothesis import given
from hypothesis import strategies as st

from tools.papers.poplar.algorithms import raise_zero, share_in_equal_rounds, share_in_proportion
from zorselike.errors import PlanError, ProfileError
from zorselike.planner.rows.share_rows import RankCosts, share_once, share_per_microbatch


@given(larger_lists(), st.integers(1, 200), st.floats(0, 3))
def test_proportion_and_equal_rounds_are_never_faster(
    costs: list[RankCosts], num_rows: int, collective_s: float
) -> None:
    once, shared = share_once(costs, num_rows), share_in_proportion(costs, num_rows)
    rounds = share_per_microbatch(costs, num_rows, collective_s=collective_s)
    equal = share_in_equal_rounds(costs, num_rows, collective_s=collective_s)
    for split in (once, shared, rounds, equal):
        check(split, costs, num_rows)
    once_s, in_rounds_s = busiest_s(once, costs), rounds_s(rounds, costs, collective_s)
    assert once_s <= busiest_s(shared, costs) * (1 + 1e-9)
    assert in_rounds_s <= rounds_s(equal, costs, collective_s) * (1 + 1e-9)
    # Waiting for others in each round costs time, if anything.
    assert once_s <= in_rounds_s * (1 + 1e-9)


def test_no_rows_go_where_none_fits() -> None:
    costs = [RankCosts(0, line(1, 4)), RankCosts(1, line(1, 4)), RankCosts(2, line(100, 4)), RankCosts(3, ())]
    assert share_in_proportion(costs, 8)[3] == ()


@given(cost_lists(), st.integers(1, 30), st.sampled_from([0.0, 0.05, 1.0]))
def test_equal_rounds_take_the_best_time_for_a_round(
    costs: list[RankCosts], num_rows: int, collective_s: float
) -> None:
    times = sorted({time for cost in costs for time in cost.seconds})
    fits = {time: sum(own <= time for cost in costs for own in cost.seconds) for time in times}
    totals = []
    for time in times:
        num_full, rest = divmod(num_rows, fits[time])
        last = [min(each for each in times if fits[each] >= rest)] if rest else []
        totals.append(sum(each + collective_s for each in [time] * num_full + last))
    found = share_in_equal_rounds(costs, num_rows, collective_s=collective_s)
    assert rounds_s(found, costs, collective_s) == pytest.approx(min(totals))


def test_the_last_round_is_timed_on_its_own() -> None:
    """Poplar's second branch: 10 rows in rounds of 4 end with one of 2, which is shorter."""
    costs = [RankCosts(0, line(1, 2)), RankCosts(1, line(1, 2))]
    for share in (share_in_equal_rounds, share_per_microbatch):
        assert rounds_s(share(costs, 10, collective_s=1), costs, 1) == 2 * 3 + 2


def test_rounds_of_different_sizes_beat_equal_ones() -> None:
    """Ten rows as 4 + 3 + 3; equal rounds of 4 end with one of 2, of 3 with one of 1."""
    cost = RankCosts(0, (3.0, 3.5, 4.0, 5.2))
    assert share_per_microbatch([cost], 10) == ((4, 3, 3),)
    assert rounds_s(share_in_equal_rounds([cost], 10), [cost]) == pytest.approx(13.9)


def test_the_zero_stage_rises_until_a_row_fits_everywhere() -> None:
    rows = {0: [0, 4], 1: [0, 8], 2: [1, 8], 3: [2, 8]}
    assert raise_zero(rows) == 2
    assert raise_zero({1: [0, 1, 0], 2: [0, 2, 1], 3: [0, 2, 1]}) == 2
    with pytest.raises(PlanError, match="not one row fits on any card at ZeRO 2, 3"):
        raise_zero({2: [0], 3: [0]})


@pytest.mark.parametrize(("costs", "num_rows", "message"), REFUSED)
def test_what_no_split_can_be_made_of_is_refused(costs: list[RankCosts], num_rows: int, message: str) -> None:
    for share in (share_in_proportion, share_in_equal_rounds):
        with pytest.raises(PlanError, match=message):
            share(costs, num_rows)


def test_a_row_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ProfileError, match="a row takes no time"):
        share_in_proportion([RankCosts(0, (0.0, 1.0))], 3)
