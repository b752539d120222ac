"""The order that bounds microbatches in flight: what it is, that it ends, and what it saves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import volume
from hypothesis import given
from hypothesis import strategies as st
from plain_costs import make_costs
from plans import plans, random_plan, with_bounds
from schedules import Lists, NaiveRun, count_in_flight, spec_of

from zorselike.cost.memory import walk_memory
from zorselike.plan.plan import GradReduce, Group, Microbatch, Ministage, Plan
from zorselike.schedule import Action, Kind, ScheduleSpec, build, check, format_actions
from zorselike.schedule.actions import COMPUTE
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.orders.in_flight import (
    LowBoundError,
    least_in_flight,
    order_in_flight,
)
from zorselike.simulator import simulate


def pipeline(
    *sizes: Sequence[int], bounds: Sequence[int | None], zero: int = 0, grad_reduce: GradReduce = "once"
) -> Plan:
    """One rank a group; group `g` has microbatches of `sizes[g]` rows."""
    groups = []
    for g, own in enumerate(sizes):
        ends = [0, *accumulate(own)]
        microbatches = tuple(Microbatch(g, *rows) for rows in pairwise(ends))
        groups.append(Group((g,), microbatches, zero, grad_reduce, max_in_flight=bounds[g]))
    modules = tuple(Ministage(g, (f"layers.{g}",)) for g in range(len(sizes)))
    return Plan(sum(sizes[0]), tuple(groups), modules).validate()


def bound_to(plan: Plan, bounds: Sequence[int | None]) -> Plan:
    groups = zip(plan.groups, bounds, strict=True)
    return replace(plan, groups=tuple(replace(group, max_in_flight=bound) for group, bound in groups))


def computed(actions: Sequence[Action]) -> str:
    return format_actions(action for action in actions if action.kind in COMPUTE)


def random_spec(rng: random.Random) -> ScheduleSpec:
    """Ranks with and without rows, of any sizes and ZeRO stages, with any options of `build`."""
    plan = random_plan(
        rng,
        max_groups=5,
        max_ranks_per_group=4,
        max_ministages_per_group=rng.choice((1, 4)),
        max_rows=16,
        round_robin=rng.random() < 0.5,
    )
    return spec_of(rng, with_bounds(plan, rng).validate())


# -- by hand -----------------------------------------------------------------------------------


def test_backwards_go_first() -> None:
    plan = pipeline([1] * 4, [1] * 4, bounds=(None, 2))
    assert [computed(own) for own in build(ScheduleSpec(plan)).values()] == [
        # The first gradient is back after 1 + 1 + 2 of nominal time, in which three more go forward.
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]
    assert [computed(own) for own in build(ScheduleSpec(bound_to(plan, (3, None)))).values()] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]


def test_a_recomputing_backward_takes_a_forward_more() -> None:
    plan = pipeline([1] * 8, [1] * 8, bounds=(8, 8))
    again = replace(plan, groups=tuple(replace(group, recompute="layer") for group in plan.groups))
    assert count_in_flight(ScheduleSpec(plan)) == (4, 1)
    assert count_in_flight(ScheduleSpec(again)) == (5, 1)


@pytest.mark.parametrize(
    ("zero", "grad_reduce", "first", "last"),
    [
        (0, "once", "0B2 0REDUCE_GRAD 0STEP", "1B2 1SEND_B2@0[2:3] 1REDUCE_GRAD 1STEP"),
        (
            1,
            "once",
            "0B2 0REDUCE_GRAD 0RESHARD 0STEP",
            "1B2 1SEND_B2@0[2:3] 1REDUCE_GRAD 1RESHARD 1STEP",
        ),
        (
            2,
            "microbatch",
            "0B2 0REDUCE_GRAD2 0RESHARD 0STEP",
            "1B2 1SEND_B2@0[2:3] 1REDUCE_GRAD2 1RESHARD 1STEP",
        ),
        (3, "microbatch", "0B2 0STEP", "1B2 1SEND_B2@0[2:3] 1STEP"),
    ],
)
def test_parameters_are_gathered_once(zero: int, grad_reduce: GradReduce, first: str, last: str) -> None:
    plan = pipeline([1] * 3, [1] * 3, bounds=(2, 1), zero=zero, grad_reduce=grad_reduce)
    lists = build(ScheduleSpec(plan))
    texts = [format_actions(own) for own in lists.values()]
    assert [text.endswith(end) for text, end in zip(texts, (first, last), strict=True)] == [True, True]
    assert [text.count("UNSHARD") for text in texts] == [int(zero in (1, 2))] * 2
    assert computed(lists[0]) == "0F0 0F1 0B0 0F2 0B1 0B2"


def test_ranks_leave_out_the_rounds_that_they_do_not_have() -> None:
    groups = (
        Group((0, 1), tuple(Microbatch(int(row == 3), row, row + 1) for row in range(4)), max_in_flight=2),
        Group((2,), tuple(Microbatch(2, row, row + 1) for row in (3, 0, 1, 2))),
    )
    plan = Plan(4, groups, (Ministage(0, ("a",)), Ministage(1, ("b",)))).validate()
    assert [computed(own) for own in build(ScheduleSpec(plan)).values()] == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "0F0 0B0",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]


def test_groups_below_what_trains_go_forward_without_bound() -> None:
    plan = pipeline([1] * 4, [1] * 4, [1] * 4, bounds=(1, 2, 1))
    spec = ScheduleSpec(plan, trainable=(False, True, True))
    lists = build(spec)
    check(spec, lists)
    assert computed(lists[0]) == "0F0 0F1 0F2 0F3"
    assert computed(lists[1]) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert count_in_flight(spec) == (0, 2, 1)
    assert count_in_flight(ScheduleSpec(plan, forward_only=True)) == (0, 0, 0)


def test_an_evaluation_goes_forward_only() -> None:
    plan = pipeline([1, 1, 2], [4], bounds=(1, 1))  # Too low for a step, and nothing is held here.
    assert build(ScheduleSpec(plan, forward_only=True)) == build(
        ScheduleSpec(bound_to(plan, (None, None)), forward_only=True)
    )


def test_a_single_ministage_accumulates_with_or_without_a_bound() -> None:
    plan = pipeline([1, 2, 1], bounds=(1,))
    assert build(ScheduleSpec(plan)) == build(ScheduleSpec(bound_to(plan, (None,))))


def test_rows_that_do_not_match_need_more_in_flight() -> None:
    sizes = ([1] * 8, [4, 4], [2] * 4)
    plan = pipeline(*sizes, bounds=(4, 1, 1))
    assert least_in_flight(plan) == (4, 1, 1)
    assert count_in_flight(ScheduleSpec(plan)) == (4, 1, 1)
    growing = pipeline([1] * 8, [2] * 4, [4, 4], bounds=(1, 1, 1))
    assert least_in_flight(growing) == (4, 2, 1)
    for bounds, message in (
        ((3, None, None), r"^groups\[0\].max_in_flight is 3 and must be 4 or more: only then"),
        ((1, 1, None), r"^groups\[0\].max_in_flight is 1 and must be 4 or more: only then"),
    ):
        with pytest.raises(LowBoundError, match=message):
            build(ScheduleSpec(bound_to(plan, bounds)))
    with pytest.raises(
        LowBoundError, match=r"^groups\[0\].* is 1 .* 4 or more; groups\[1\].* 2 or more: only"
    ):
        build(ScheduleSpec(growing))


# -- rules for all plans -----------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(6))
def test_what_build_makes_is_right(block: int) -> None:
    for seed in volume.part(range(50)):
        rng = random.Random(f"{block}/{seed}")
        spec = random_spec(rng)
        plan = spec.plan
        try:
            lists = build(spec)
            check(spec, lists)
            assert lists == build(spec)
            assert NaiveRun(plan, lists, spec.ties, None).ends(rng)
            for rank, own in lists.items():
                _assert_in_turn(own)
                bound = plan.groups[plan.group_of_rank[rank]].max_in_flight
                if bound is not None:
                    assert _count_held(plan, rank, own) <= bound
        except Exception as error:
            error.add_note(f"seed {block}/{seed}")
            raise


def _assert_in_turn(own: Sequence[Action]) -> None:
    """Forwards and backwards of each ministage by number."""
    for kind, i in {(action.kind, action.ministage) for action in own if action.kind in COMPUTE}:
        numbers = [action.microbatch for action in own if (action.kind, action.ministage) == (kind, i)]
        assert numbers == list(range(len(numbers)))


def _count_held(plan: Plan, rank: int, own: Sequence[Action]) -> int:
    """The most microbatches with rows that are forward and not backward, of ministages that go backward."""
    held: set[tuple[int | None, int | None]] = set()
    most = 0
    goes_back = {action.ministage for action in own if action.kind is Kind.B}
    for action in own:
        has_rows = (action.microbatch or 0) < len(plan.microbatches_of_rank(rank))
        if action.kind is Kind.F and has_rows and action.ministage in goes_back:
            held.add((action.ministage, action.microbatch))
        elif action.kind is Kind.B:
            held.discard((action.ministage, action.microbatch))
        most = max(most, len(held))
    return most


SMALL = {"max_groups": 3, "max_ranks_per_group": 2, "max_ministages_per_group": 3, "max_rows": 6}


@given(
    st.one_of(plans(max_ministages_per_group=1, round_robin=False), plans(**SMALL, round_robin=False)),
    st.randoms(use_true_random=False),
)
def test_the_least_bounds_are_those_with_which_a_step_ends(plan: Plan, rng: random.Random) -> None:
    least = least_in_flight(plan)
    at_least = bound_to(plan, least)
    assert _ends(at_least)
    assert count_in_flight(ScheduleSpec(at_least)) == least
    assert least_in_flight(at_least) == least
    g = rng.randrange(len(least))
    if least[g] > 1:
        # However many the others may hold.
        lower = bound_to(plan, [least[g] - 1 if i == g else None for i in range(len(least))])
        assert not _ends(lower)
        with pytest.raises(LowBoundError, match=rf"groups\[{g}\].max_in_flight .* {least[g]} or more"):
            order_in_flight(ScheduleSpec(lower))


def _ends(plan: Plan) -> bool:
    """A second opinion without times: whether any order at all ends, found by trying all, row by row. A
    backward that can be done is done at once: it only makes room."""
    rounds = [_rows_of_rounds(plan.group_of(i)) for i in range(plan.num_ministages)]
    seen: set[tuple[int, ...]] = set()
    open_states = [(0,) * plan.num_ministages]
    while open_states:
        forward = open_states.pop()
        if forward in seen:
            continue
        seen.add(forward)
        if forward == tuple(map(len, rounds)):
            return True
        backward = _go_backward(rounds, forward)
        done = [set().union(*own[:m]) for own, m in zip(rounds, forward, strict=True)]
        for i, m in enumerate(forward):
            bound = plan.group_of(i).max_in_flight
            own = plan.ministages_of_group(plan.ministages[i].group)
            in_flight = sum(forward[j] - backward[j] for j in own)
            has_room = bound is None or in_flight < bound
            if m < len(rounds[i]) and has_room and (i == 0 or rounds[i][m] <= done[i - 1]):
                open_states.append((*forward[:i], m + 1, *forward[i + 1 :]))
    return False


def _go_backward(rounds: Sequence[Sequence[set[int]]], forward: Sequence[int]) -> list[int]:
    """How many microbatches of each ministage can have gone backward after so many forward."""
    backward = [0] * len(rounds)
    behind: set[int] | None = None
    for i in reversed(range(len(rounds))):
        while backward[i] < forward[i] and (behind is None or rounds[i][backward[i]] <= behind):
            backward[i] += 1
        behind = set().union(*rounds[i][: backward[i]])
    return backward


def _rows_of_rounds(group: Group) -> list[set[int]]:
    rounds: list[set[int]] = [set() for _ in range(group.max_microbatches)]
    for own in group.microbatches_by_rank.values():
        for m, microbatch in enumerate(own):
            rounds[m].update(range(microbatch.start, microbatch.stop))
    return rounds


@given(plans(max_ministages_per_group=3, round_robin=False), st.randoms(use_true_random=False))
def test_what_is_counted_is_what_the_order_holds(plan: Plan, rng: random.Random) -> None:
    plan = with_bounds(plan, rng)
    lowest = rng.randint(0, plan.num_ministages)
    spec = ScheduleSpec(plan, trainable=tuple(i >= lowest for i in range(plan.num_ministages)))
    counts = count_in_flight(spec)
    for g, order in enumerate(order_in_flight(spec)):
        rounds, own = range(plan.groups[g].max_microbatches), plan.ministages_of_group(g)
        expected = {Action(Kind.F, i, m) for i in own for m in rounds}
        expected |= {Action(Kind.B, i, m) for i in own for m in rounds if i >= lowest}
        assert len(order) == len(expected) and {*order} == expected
        back = [action for action in order if (action.ministage or 0) >= lowest]
        held = [sum(1 if a.kind is Kind.F else -1 for a in back[: n + 1]) for n in range(len(back))]
        assert counts[g] == max(held, default=0)
        assert counts[g] <= (plan.groups[g].max_in_flight or len(rounds) * len(own))


@pytest.mark.parametrize("num_groups", range(1, 6))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 12])
def test_even_pipelines_bound_to_their_depth_are_1f1b(num_groups: int, num_microbatches: int) -> None:
    bounds = [num_groups - g for g in range(num_groups)]
    plan = pipeline(*[[2] * num_microbatches] * num_groups, bounds=bounds)
    ours, theirs = build(ScheduleSpec(plan)), build(ScheduleSpec(plan), "1f1b")
    assert {rank: computed(own) for rank, own in ours.items()} == {
        rank: computed(own) for rank, own in theirs.items()
    }


def test_fewer_activations_are_held() -> None:
    plan = pipeline(*[[2] * 12] * 4, bounds=(8, 8, 8, 8))
    costs = make_costs(plan, row_bytes=1, sizes={"boundary_bytes_per_row": 0})

    def held(lists: Lists) -> list[int]:
        walks = [walk_memory(plan, rank, own, costs.sizes[rank]) for rank, own in lists.items()]
        return [walk.device["activations"] for walk in walks]

    assert held(build(ScheduleSpec(bound_to(plan, (None,) * 4)))) == [24, 24, 24, 2]
    assert (
        held(build(ScheduleSpec(plan)))
        == [2 * num_held for num_held in count_in_flight(ScheduleSpec(plan))]
        == [16, 14, 8, 2]
    )
    assert held(build(ScheduleSpec(bound_to(plan, (4, 3, 2, 1))))) == [8, 6, 4, 2]


def test_without_bounds_as_many_are_in_flight_as_slow_transfers_ask_for() -> None:
    """Through the last ministage of each group; one in the last of all."""
    plan = bound_to(pipeline(*[[1] * 64] * 4, bounds=(1, 1, 1, 1)), (None,) * 4)
    found = []
    for own in build(ScheduleSpec(plan)).values():
        kinds = [action.kind for action in own if action.kind in COMPUTE]
        found.append(max(accumulate(1 if kind is Kind.F else -1 for kind in kinds)))
    assert found == [58, 39, 20, 1]


@pytest.mark.parametrize(
    "num_groups, num_turns, num_microbatches", [(2, 4, 8), (4, 2, 16), (4, 4, 16), (8, 2, 32)]
)
def test_as_many_in_flight_as_ministages_fill_the_pipeline(
    num_groups: int, num_turns: int, num_microbatches: int
) -> None:
    """No slower than all forwards first where transfers take no time, and little slower where they take a
    tenth of a forward; with at most half of the activations."""
    plan = pipeline(
        *[[1] * num_microbatches] * num_groups, bounds=(num_groups * num_turns,) * num_groups, zero=1
    )
    ministages = tuple(Ministage(i % num_groups, (f"layers.{i}",)) for i in range(num_groups * num_turns))
    plan = replace(plan, ministages=ministages).validate()
    free = bound_to(plan, (None,) * num_groups)
    for row_bytes, most in ((0.0, 1 + 1e-9), (0.1, 1.05)):
        costs = make_costs(plan, row_bytes=row_bytes)  # type: ignore[arg-type]
        found, forward_first = (
            simulate(own, build(ScheduleSpec(own)), costs).iteration_s for own in (plan, free)
        )
        assert found <= forward_first * most
    assert max(count_in_flight(ScheduleSpec(plan))) <= num_microbatches * num_turns / 2


@pytest.mark.parametrize("num_groups, num_microbatches", [(2, 4), (3, 9), (4, 8), (4, 16), (6, 12)])
def test_twice_as_many_in_flight_as_groups_cost_no_time(num_groups: int, num_microbatches: int) -> None:
    plan = pipeline(*[[1] * num_microbatches] * num_groups, bounds=(2 * num_groups,) * num_groups)
    for row_bytes in (0.0, 0.1):  # Transfers take no time, or a tenth of a forward.
        costs = make_costs(plan, row_bytes=row_bytes)  # type: ignore[arg-type]
        found, forward_first = (
            simulate(plan, lists, costs).iteration_s
            for lists in (
                build(ScheduleSpec(plan)),
                build(ScheduleSpec(bound_to(plan, (None,) * num_groups))),
            )
        )
        assert found <= forward_first * (1 + 1e-9)


# -- the checker -------------------------------------------------------------------------------


@pytest.mark.nightly
def test_one_more_in_flight_is_refused() -> None:
    """A forward moved ahead of the backward that makes room for it, wherever its inputs allow that."""
    num_refused = 0
    seeds = volume.part(range(220), least=44)
    for seed in seeds:
        rng = random.Random(seed)
        spec = random_spec(rng)
        plan = spec.plan
        lists = build(spec)
        for rank, own in lists.items():
            bound = plan.groups[plan.group_of_rank[rank]].max_in_flight
            places = [c for c in _swap_turns(own) if bound and _count_held(plan, rank, c) > bound]
            if not places:
                continue
            changed = rng.choice(places)
            message = f"^rank {rank}, .*: {bound + 1} microbatches would be in flight, and .* is {bound}:"
            with pytest.raises(ScheduleError, match=message):
                check(spec, {**lists, rank: changed})
            num_refused += 1
    assert num_refused >= len(seeds) * 30 / 220


def _swap_turns(own: Sequence[Action]) -> Iterator[list[Action]]:
    """Each forward that follows a backward and its sends, put before it."""
    kinds = [action.kind for action in own]
    for position, kind in enumerate(kinds):
        before = position - 1
        while before >= 0 and kinds[before] is Kind.SEND_B:
            before -= 1
        if kind is Kind.F and before >= 0 and kinds[before] is Kind.B:
            yield [*own[:before], own[position], *own[before:position], *own[position + 1 :]]
