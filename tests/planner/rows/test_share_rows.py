"""Rows to ranks: no split is better, every row once, no more at once than fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise, product

import pytest
from batch_splits import REFUSED, RISING, busiest_s, check, cost_lists, larger_lists, line, rounds_s
from hypothesis import given
from hypothesis import strategies as st

from zorselike.errors import PlanError, ProfileError
from zorselike.planner.rows.microbatch_sums import pick_sizes, sum_microbatches
from zorselike.planner.rows.share_rows import RankCosts, share_once, share_per_microbatch

ROOM = st.sampled_from([None, None, 0, 1, 2, 3, 5])


@st.composite
def roomy_lists(draw: st.DrawFn) -> list[RankCosts]:
    """The same, with room for a few rows of the step on some."""
    return [replace(cost, most_rows=draw(ROOM)) for cost in draw(cost_lists())]


def least_sum(seconds: tuple[float, ...], num_rows: int) -> float:
    """By trying every size of the next microbatch."""
    if num_rows == 0:
        return 0.0
    fits = range(1, min(num_rows, len(seconds)) + 1)
    return min((seconds[n - 1] + least_sum(seconds, num_rows - n) for n in fits), default=math.inf)


def least_once(costs: Sequence[RankCosts], num_rows: int) -> float:
    """By trying every way to give rows to cards."""
    room = [range(int(min(num_rows, find_room(cost))) + 1) for cost in costs]
    return min(
        (
            max(least_sum(cost.seconds, own) for cost, own in zip(costs, rows, strict=True))
            for rows in product(*room)
            if sum(rows) == num_rows
        ),
        default=math.inf,
    )


def find_room(cost: RankCosts) -> float:
    return math.inf if cost.most_rows is None else cost.most_rows


def least_per_microbatch(
    costs: Sequence[RankCosts], num_rows: int, collective_s: float, hidden_s: float
) -> float:
    """By trying every round: any size on every card."""
    ways = list(product(*(range(cost.max_rows + 1) for cost in costs)))
    lasts = [
        max(cost.seconds[n - 1] for cost, n in zip(costs, sizes, strict=True) if n) if any(sizes) else 0.0
        for sizes in ways
    ]

    @cache
    def best(left: int, room: tuple[float, ...]) -> float:
        if left == 0:
            return 0.0
        return min(
            (
                collective_s + max(time, hidden_s) + best(left - sum(sizes), take(room, sizes))
                for sizes, time in zip(ways, lasts, strict=True)
                if 0 < sum(sizes) <= left and min(take(room, sizes)) >= 0
            ),
            default=math.inf,
        )

    def take(room: tuple[float, ...], sizes: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(most - own for most, own in zip(room, sizes, strict=True))

    return best(num_rows, tuple(find_room(cost) for cost in costs))


@given(RISING, st.integers(0, 9))
def test_sums_are_the_cheapest_and_sizes_make_them(seconds: tuple[float, ...], num_rows: int) -> None:
    least = sum_microbatches(seconds, num_rows)
    assert list(least) == sorted(least)
    assert least[num_rows] == pytest.approx(least_sum(seconds, num_rows))
    if seconds:
        sizes = pick_sizes(seconds, least, num_rows)
        assert sum(sizes) == num_rows and list(sizes) == sorted(sizes, reverse=True)
        assert sum(seconds[size - 1] for size in sizes) == pytest.approx(least[num_rows])


@given(cost_lists(), st.integers(1, 7))
def test_no_split_is_faster_with_collectives_once_a_step(costs: list[RankCosts], num_rows: int) -> None:
    split = share_once(costs, num_rows)
    check(split, costs, num_rows)
    assert busiest_s(split, costs) == pytest.approx(least_once(costs, num_rows))


@given(
    cost_lists(), st.integers(1, 9), st.sampled_from([0.0, 0.05, 1.0]), st.sampled_from([0.0, 0.35, 0.8, 5.0])
)
def test_no_split_is_faster_with_collectives_in_each_round(
    costs: list[RankCosts], num_rows: int, collective_s: float, hidden_s: float
) -> None:
    split = share_per_microbatch(costs, num_rows, collective_s=collective_s, hidden_s=hidden_s)
    check(split, costs, num_rows)
    seconds = rounds_s(split, costs, collective_s, hidden_s)
    assert seconds == pytest.approx(least_per_microbatch(costs, num_rows, collective_s, hidden_s))


def have_room(costs: Sequence[RankCosts], num_rows: int) -> bool:
    return sum(min(find_room(cost), num_rows) for cost in costs if cost.seconds) >= num_rows


@given(roomy_lists(), st.integers(1, 7))
def test_no_split_is_faster_where_room_for_a_step_is_limited(costs: list[RankCosts], num_rows: int) -> None:
    if not have_room(costs, num_rows):
        assert least_once(costs, num_rows) == math.inf
        for share in (share_once, share_per_microbatch):
            with pytest.raises(PlanError, match=rf"room for \d+ of {num_rows} rows; recompute"):
                share(costs, num_rows)
        return
    split = share_once(costs, num_rows)
    check(split, costs, num_rows)
    assert busiest_s(split, costs) == pytest.approx(least_once(costs, num_rows))


@given(roomy_lists(), st.integers(1, 8), st.sampled_from([0.05, 1.0]), st.sampled_from([0.0, 0.8]))
def test_rounds_heed_room_and_are_about_the_best(
    costs: list[RankCosts], num_rows: int, collective_s: float, hidden_s: float
) -> None:
    """Not proven to be the best; of thousands of random cases none was more than round-off above it."""
    if not have_room(costs, num_rows):
        return
    split = share_per_microbatch(costs, num_rows, collective_s=collective_s, hidden_s=hidden_s)
    check(split, costs, num_rows)
    seconds = rounds_s(split, costs, collective_s, hidden_s)
    best = least_per_microbatch(costs, num_rows, collective_s, hidden_s)
    assert best * (1 - 1e-9) <= seconds <= best * 1.25
    free = share_per_microbatch(
        [replace(cost, most_rows=None) for cost in costs],
        num_rows,
        collective_s=collective_s,
        hidden_s=hidden_s,
    )
    free_s = rounds_s(free, costs, collective_s, hidden_s)
    assert seconds >= free_s * (1 - 1e-9)
    if all(sum(own) <= find_room(cost) for cost, own in zip(costs, free, strict=True)):
        assert seconds == pytest.approx(free_s)


def test_a_card_that_is_full_leaves_the_rest_to_slow_ones() -> None:
    """Ten rounds in which both compute, eighty in which the fast one does alone."""
    costs = [RankCosts(0, (0.1,), most_rows=90), RankCosts(1, (1.0,))]
    split = share_per_microbatch(costs, 100)
    assert list(map(sum, split)) == [90, 10] and rounds_s(split, costs) == pytest.approx(18)
    # Of many times a few are tried at first; this one is not among them.
    costs = [RankCosts(0, line(1, 100), most_rows=37), RankCosts(1, line(1, 100))]
    split = share_per_microbatch(costs, 80, collective_s=1000)
    assert split == ((37,), (43,)) and rounds_s(split, costs, 1000) == 1043


@given(larger_lists(), st.integers(1, 100), st.integers(0, 23), st.floats(0.1, 1), st.integers(0, 3))
def test_a_faster_or_larger_card_never_makes_it_slower(
    costs: list[RankCosts], num_rows: int, which: int, factor: float, more: int
) -> None:
    i = which % len(costs)
    own = costs[i].seconds
    better = list(costs)
    grown = (*own, *(own[-1] + (n + 1) * own[0] for n in range(more)))
    better[i] = RankCosts(costs[i].rank, tuple(factor * each for each in grown))
    bound = 1 + 1e-9
    once, better_once = share_once(costs, num_rows), share_once(better, num_rows)
    assert busiest_s(better_once, better) <= busiest_s(once, costs) * bound
    rounds, better_rounds = (share_per_microbatch(own, num_rows, collective_s=0.5) for own in (costs, better))
    assert rounds_s(better_rounds, better, 0.5) <= rounds_s(rounds, costs, 0.5) * bound


def test_a_card_that_would_only_slow_the_others_gets_no_rows() -> None:
    costs = [RankCosts(0, line(1, 4)), RankCosts(1, line(1, 4)), RankCosts(2, line(100, 4)), RankCosts(3, ())]
    for split in (share_once(costs, 8), share_per_microbatch(costs, 8)):
        assert list(map(sum, split)) == [4, 4, 0, 0]


def test_what_is_left_goes_where_it_takes_least() -> None:
    """Two rounds of 4 + 2 rows and one of the last two."""
    costs = [RankCosts(7, line(1, 4)), RankCosts(5, line(2, 4))]
    assert share_per_microbatch(costs, 14) == ((4, 4, 2), (2, 2))
    once = share_once(costs, 14)
    # In 10 s they could compute 10 + 5 rows; the one too many is taken where it saves 2 s.
    assert once == ((4, 4, 2), (4,)) and busiest_s(once, costs) == 10


def test_sizes_differ_between_cards_and_avoid_bad_ones() -> None:
    """On a card whose third row costs as much as three others, no microbatch has three."""
    bumpy = (1.0, 1.5, 4.5, 4.6)
    costs = [RankCosts(0, bumpy), RankCosts(1, line(1, 8, start=1))]
    bumped, smooth = share_once(costs, 12)
    assert set(bumped) == {2}
    assert smooth == (4,) and busiest_s((bumped, smooth), costs) == 6


def test_the_last_round_is_timed_by_itself() -> None:
    """10 rows in rounds of 4 end with one of 2, which is shorter."""
    costs = [RankCosts(0, line(1, 2)), RankCosts(1, line(1, 2))]
    assert rounds_s(share_per_microbatch(costs, 10, collective_s=1), costs, 1) == 2 * 3 + 2


@pytest.mark.parametrize(("costs", "num_rows", "message"), REFUSED)
def test_what_no_split_can_be_made_of_is_refused(costs: list[RankCosts], num_rows: int, message: str) -> None:
    for share in (share_once, share_per_microbatch):
        with pytest.raises(PlanError, match=message):
            share(costs, num_rows)


def test_wrong_times_are_refused() -> None:
    with pytest.raises(ProfileError, match="rank 4: a larger microbatch takes less time"):
        RankCosts(4, (2.0, 1.0))
    with pytest.raises(ProfileError, match="negative or not finite"):
        RankCosts(4, (1.0, math.inf))
    with pytest.raises(PlanError, match="take -1 s; give 0 or more"):
        share_per_microbatch([RankCosts(0, (1.0,))], 3, collective_s=-1)
    with pytest.raises(PlanError, match="take inf s; give 0 or more"):
        share_per_microbatch([RankCosts(0, (1.0,))], 3, hidden_s=math.inf)


SECONDS = st.one_of(
    st.lists(st.floats(0.0, 2.0), min_size=1, max_size=8).map(lambda steps: tuple(accumulate(steps))),
    st.tuples(st.floats(0.0, 1.0), st.floats(0.01, 1.0), st.integers(1, 8)).map(
        lambda curve: tuple(curve[0] + curve[1] * rows for rows in range(1, curve[2] + 1))
    ),
)
"""Of microbatches of 1, 2, ... rows; straight curves have many equally good sums."""


@given(SECONDS, st.integers(1, 300))
def test_sums_of_many_rows_go_on_as_those_of_few(seconds, num_rows):
    least = [0.0]
    for n in range(1, num_rows + 1):
        sizes = range(1, min(n, len(seconds)) + 1)
        least.append(min(seconds[size - 1] + least[n - size] for size in sizes))
    found = sum_microbatches(seconds, num_rows)
    assert found == pytest.approx(least, rel=1e-12, abs=1e-12)
    assert all(fewer <= more for fewer, more in pairwise(found))
    sizes = pick_sizes(seconds, found, num_rows)
    assert sum(sizes) == num_rows
    assert sum(seconds[size - 1] for size in sizes) == pytest.approx(least[-1], rel=1e-10, abs=1e-10)


@given(SECONDS, st.integers(1, 3), st.integers(1, 300), st.sampled_from([0.0, 0.3]))
def test_rounds_of_many_rows_go_on_as_those_of_few(seconds, num_ranks, num_rows, collective_s):
    costs = [RankCosts(rank, seconds) for rank in range(num_ranks)]
    least = [0.0]
    for n in range(1, num_rows + 1):
        least.append(
            min(
                own + collective_s + least[max(0, n - size * num_ranks)]
                for size, own in enumerate(seconds, start=1)
            )
        )
    split = share_per_microbatch(costs, num_rows, collective_s=collective_s)
    found = rounds_s(split, costs, collective_s)
    assert found == pytest.approx(least[-1], rel=1e-10, abs=1e-10)
