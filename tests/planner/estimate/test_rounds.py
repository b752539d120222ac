"""The order of computations, and microbatches in flight, from rounds alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import count_in_flight

from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.planner.candidate.candidate import CandidateGroup
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.estimate.rounds import (
    Pipeline,
    RoundOrders,
    Rounds,
    find_full,
    find_least,
    find_order,
)
from zorselike.schedule.actions import Kind
from zorselike.schedule.orders.in_flight import least_in_flight, order_in_flight
from zorselike.schedule.orders.ours import ours
from zorselike.schedule.spec import ScheduleSpec

numbers = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=2, max_size=6)


def make_plan(
    all_sizes: list[list[int]],
    bounds: Sequence[int | None],
    owners: Sequence[int],
) -> Plan:
    """A rank for each group."""
    groups = []
    for g, (sizes, bound) in enumerate(zip(all_sizes, bounds, strict=True)):
        ends = [sum(sizes[: m + 1]) for m in range(len(sizes))]
        rows = tuple(Microbatch(g, end - size, end) for size, end in zip(sizes, ends, strict=True))
        groups.append(Group((g,), rows, zero=1, max_in_flight=bound))
    ministages = tuple(Ministage(g, (str(i),)) for i, g in enumerate(owners))
    return Plan(sum(all_sizes[0]), tuple(groups), ministages)


def visit(counts, data):
    """The groups of ministages, visited in turn, the last time perhaps not all."""
    per_group = data.draw(st.integers(1, 3))
    return tuple(
        i % len(counts) for i in range(len(counts) * per_group - data.draw(st.integers(0, per_group // 2)))
    )


def cut_rows(number, data, rows=24):
    """Microbatches of any rows."""
    if rows % number == 0 and data.draw(st.booleans()):
        return [rows // number] * number
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1), min_size=number - 1, max_size=number - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]


def deal(number, data):
    """Rows of so many rounds to one to three replicas, some of which have no part in the last rounds: of each
    its microbatches."""
    lengths = [number, *data.draw(st.lists(st.integers(1, number), max_size=2))]
    places = [j for m in range(number) for j, length in enumerate(lengths) if m < length]
    sizes = [[] for _ in lengths]
    for j, rows in zip(places, cut_rows(len(places), data, rows=48), strict=True):
        sizes[j].append(rows)
    return tuple(map(tuple, sizes))


def make_plan_of(groups, bounds, owners):
    """The rows of a round follow each other."""
    made, first_rank = [], 0
    for group, bound in zip(groups, bounds, strict=True):
        rows, microbatches = 0, []
        for m in range(max(map(len, group.sizes))):
            for j, own in enumerate(group.sizes):
                if m < len(own):
                    microbatches.append(Microbatch(first_rank + j, rows, rows + own[m]))
                    rows += own[m]
        ranks = tuple(range(first_rank, first_rank + len(group.sizes)))
        first_rank += len(ranks)
        setting = group.mode.recompute
        made.append(Group(ranks, tuple(microbatches), zero=1, max_in_flight=bound, recompute=setting))
    return Plan(rows, tuple(made), tuple(Ministage(g, (str(i),)) for i, g in enumerate(owners))).validate()


@given(numbers, st.data())
def test_it_is_the_schedules_order(counts, data):
    owners = visit(counts, data)
    groups = []
    for number in counts:
        mode, sizes = Mode(recompute=data.draw(st.sampled_from(["none", "layer"]))), deal(number, data)
        groups.append(CandidateGroup(tuple(range(len(sizes))), mode, sizes))
    least = least_in_flight(make_plan_of(groups, [None] * len(counts), owners))
    bounds = [data.draw(st.integers(own, own + number)) for own, number in zip(least, counts, strict=True)]
    lowest = data.draw(st.integers(0, 1))
    trains = tuple(i >= lowest for i in range(len(owners)))
    spec = ScheduleSpec(make_plan_of(groups, bounds, owners), trainable=trains)
    rounds = tuple(Rounds.of(group, bound) for group, bound in zip(groups, bounds, strict=True))
    found = find_order(Pipeline(rounds, owners, lowest))
    for g, order in enumerate(order_in_flight(spec)):
        ways = [step.way for step in found.steps if step.group == g]
        assert ways == [2 * action.ministage + "FB".index(action.kind.name) for action in order]
    assert found.num_in_flight == count_in_flight(spec)
    assert all(step.awaited < position for position, step in enumerate(found.steps))


@given(numbers, st.data())
def test_without_bounds_as_many_are_in_flight_of_last_ministages_as_in_the_schedule(counts, data):
    owners, rows = visit(counts, data), math.lcm(*counts)
    sizes = [[rows // number] * number for number in counts]
    order = ours(ScheduleSpec(make_plan(sizes, [None] * len(counts), owners)))
    found = RoundOrders().count_in_flight(counts, owners)
    for g, computations in enumerate(order.computations):
        last = max(i for i, owner in enumerate(owners) if owner == g)
        ways = [1 if action.kind is Kind.F else -1 for action in computations if action.ministage == last]
        assert found[g] == max(accumulate(ways))


@given(numbers, st.data())
def test_least_bounds_are_those_of_the_schedule(counts, data):
    owners = visit(counts, data)
    sizes = [cut_rows(number, data) for number in counts]
    found = find_least(tuple(map(tuple, sizes)), owners)
    assert found == least_in_flight(make_plan(sizes, [1] * len(counts), owners))


@given(st.integers(1, 6), st.integers(1, 3), st.sampled_from([8, 12, 32]), st.sampled_from([1.0, 1.5, 2.0]))
def test_of_rounds_that_match_a_pipeline_is_full_with_as_many_as_groups_follow(number, turns, rounds, factor):
    groups = [CandidateGroup((g,), Mode(), ((1,) * rounds,)) for g in range(number)]
    bounds = list(RoundOrders().find_bounds(groups, tuple(range(number)) * turns, factor))
    full = [(turns - 1) * number + number - g for g in range(number)]
    for bound, own in zip(bounds, full, strict=True):
        assert bound <= math.ceil(factor * own)  # Or as many as the order comes to hold.
        assert factor > 1 or bound == min(own, rounds * turns)


@pytest.mark.parametrize(
    ("counts", "full"),
    [
        ((24, 24, 24), (3, 2, 1)),
        ((24, 24, 32, 32), (5, 4, 2, 1)),
        ((32, 32, 16, 32, 32), (9, 8, 3, 2, 1)),
        ((32, 16, 32), (6, 2, 1)),
        ((6, 3), (4, 1)),
    ],
)
def test_where_rounds_do_not_match_it_takes_more(counts, full):
    rows = tuple((96 // number,) * number for number in counts)
    assert find_full(rows) == full
    groups = [CandidateGroup((g,), Mode(), (own,)) for g, own in enumerate(rows)]
    owners = tuple(range(len(counts)))
    assert tuple(RoundOrders().find_bounds(groups, owners, 1.0)) == full

    def measure(bounds):
        rounds = tuple(Rounds.of(group, bound) for group, bound in zip(groups, bounds, strict=True))
        order = find_order(Pipeline(rounds, owners))
        ready, ended = [0.0] * len(counts), []
        for group, way, awaited in order.steps:
            begin = max(ready[group], ended[awaited] if awaited >= 0 else 0.0)
            ready[group] = begin + (1 + way % 2) / 3 / counts[group]
            ended.append(ready[group])
        return max(ready)

    assert measure(full) <= 1.03 * measure(counts)
    if full[0] > len(counts):
        fewer = [max(1, own - 1) for own in full]
        assert measure(fewer) > 1.1 * measure(full)
