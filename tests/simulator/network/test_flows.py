"""Shares of capacities against a slow reference, and against what max-min fair means."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zorselike.cost.network import Flow
from zorselike.simulator.network.flows import FlowShares
from zorselike.simulator.network.traffic import Event, Traffic

Ways = Mapping[int, tuple[tuple[int, ...], float]]
"""Capacities of each flow, and its most."""

CAPACITIES = st.lists(st.sampled_from([1.0, 1.0, 2.0, 3.0, 5.5, 100.0]), min_size=1, max_size=6)


@st.composite
def comings_and_goings(draw: st.DrawFn) -> tuple[list[float], list[tuple[int, tuple[int, ...], float] | int]]:
    """Capacities, then flows that come and numbers of flows that go."""
    capacities = draw(CAPACITIES)
    changes: list[tuple[int, tuple[int, ...], float] | int] = []
    present: list[int] = []
    for number in range(draw(st.integers(1, 25))):
        if present and draw(st.integers(0, 2)) == 0:
            changes.append(present.pop(draw(st.integers(0, len(present) - 1))))
            continue
        way = tuple(sorted(draw(st.sets(st.integers(0, len(capacities) - 1), min_size=1, max_size=3))))
        most = draw(st.sampled_from([0.25, 0.5, 1.0, 1.7, 4.0, math.inf]))
        changes.append((number, way, most))
        present.append(number)
    return capacities, changes


def fill_slowly(capacities: Sequence[float], ways: Ways) -> dict[int, float]:
    """Progressive filling over all flows, by the textbook."""
    rates: dict[int, float] = {}
    while len(rates) < len(ways):
        growing = [flow for flow in ways if flow not in rates]
        shares = {}
        for c, capacity in enumerate(capacities):
            passing = [flow for flow in ways if c in ways[flow][0]]
            left = [flow for flow in passing if flow not in rates]
            if left:
                shares[c] = (capacity - sum(rates[flow] for flow in passing if flow in rates)) / len(left)
        level = min([*shares.values(), *(ways[flow][1] for flow in growing)])
        for flow in growing:
            way, most = ways[flow]
            if most <= level or any(shares[c] <= level * (1 + 1e-12) for c in way):
                rates[flow] = level
    return rates


@settings(max_examples=300)
@given(comings_and_goings(), st.randoms(use_true_random=False))
def test_shares_are_those_of_the_reference(
    case: tuple[list[float], list[tuple[int, tuple[int, ...], float] | int]], draw_more: random.Random
) -> None:
    capacities, changes = case
    shares = FlowShares(capacities)
    ways: dict[int, tuple[tuple[int, ...], float]] = {}
    kinds: dict[int, int] = {}
    before: dict[int, float] = {}
    for change in changes:
        if isinstance(change, int):
            del ways[change]
            kind = kinds.pop(change)
            shares.remove(kind)
        else:
            flow, way, most = change
            ways[flow] = (way, most)
            kind = kinds[flow] = shares.find_kind(way, most)
            shares.add(kind)
        before.pop(kind, None)
        if draw_more.random() < 0.5 and change is not changes[-1]:
            continue  # Several changes at one time.
        changed = shares.settle()
        rates = {flow: shares.rates[kind] for flow, kind in kinds.items()}
        assert rates == pytest.approx(fill_slowly(capacities, ways), rel=1e-9)
        assert_fair(capacities, ways, rates)
        # Who asks knows which kinds it has changed; what it is told are the others.
        assert {k for k in before if shares.rates[k] != before[k]} == set(changed) & set(before)
        before = {kind: shares.rates[kind] for kind in kinds.values()}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 9))
def test_flows_of_one_kind_share_alike(counts: list[int], num_gone: int) -> None:
    """Kinds over one capacity, each also with one of its own; then some flows of the first kind go."""
    capacities = [100.0] + [60.0] * len(counts)
    shares = FlowShares(capacities)
    kinds = [shares.find_kind((0, 1 + i), math.inf) for i in range(len(counts))]
    for kind, count in zip(kinds, counts, strict=True):
        for _ in range(count):
            shares.add(kind)
    shares.settle()
    for _ in range(min(num_gone, counts[0] - 1)):
        shares.remove(kinds[0])
    left = [counts[0] - min(num_gone, counts[0] - 1), *counts[1:]]
    shares.settle()
    flows = [(i, copy) for i, count in enumerate(left) for copy in range(count)]
    expected = fill_slowly(capacities, {n: ((0, 1 + i), math.inf) for n, (i, _) in enumerate(flows)})
    found = {n: shares.rates[kinds[i]] for n, (i, _) in enumerate(flows)}
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_most_that_no_flow_can_reach_makes_no_other_kind() -> None:
    shares = FlowShares([2.0, 3.0, math.inf])
    assert shares.find_kind((0, 1), math.inf) == shares.find_kind((0, 1, 2), 2.0)
    assert shares.find_kind((0, 1), 2.0) != shares.find_kind((0, 1), 1.0)
    assert shares.find_kind((1,), 2.0) != shares.find_kind((0, 1), 2.0)


def assert_fair(capacities: Sequence[float], ways: Ways, rates: Mapping[int, float]) -> None:
    """No capacity carries more than it can, and every flow has a bottleneck: its own most, or a full
    capacity on which nobody has more."""
    used = [sum(rates[f] for f in ways if c in ways[f][0]) for c in range(len(capacities))]
    assert all(use <= capacity * (1 + 1e-6) for use, capacity in zip(used, capacities, strict=True))
    for flow, (way, most) in ways.items():
        bottlenecks = [
            c
            for c in way
            if used[c] >= capacities[c] * (1 - 1e-6)
            and all(rates[other] <= rates[flow] * (1 + 1e-6) for other in ways if c in ways[other][0])
        ]
        assert bottlenecks or rates[flow] >= most * (1 - 1e-6)


# -- in time -----------------------------------------------------------------------------------


def end_of(arrivals: Sequence[tuple[float, Flow]], capacities: Sequence[float]) -> list[float]:
    """When each flow is over, one task a flow."""
    heap: list[Event] = []
    traffic = Traffic(capacities, [(flow,) for _, flow in arrivals], heap)
    ends = [math.nan] * len(arrivals)
    coming = sorted(range(len(arrivals)), key=lambda task: arrivals[task][0], reverse=True)
    now = 0.0
    while coming or heap or not traffic.is_settled:
        following = min(
            [arrivals[task][0] for task in coming[-1:]] + [at for at, _ in heap[:1]], default=math.inf
        )
        if following > now and not traffic.is_settled:
            traffic.settle(now)
            continue
        now = following
        if coming and arrivals[coming[-1]][0] <= now:
            task = coming.pop()
            if traffic.start(now, task, task):
                ends[task] = now
            continue
        for task in traffic.handle(*heapq.heappop(heap)):
            ends[task] = now
    return ends


def end_slowly(arrivals: Sequence[tuple[float, Flow]], capacities: Sequence[float]) -> list[float]:
    """The same with all shares made anew at every event."""
    begins = [at + flow.latency_s for at, flow in arrivals]
    left = [flow.num_bytes for _, flow in arrivals]
    ends = [math.nan] * len(arrivals)
    now = 0.0
    while any(map(math.isnan, ends)):
        moving = [i for i, begin in enumerate(begins) if begin <= now and math.isnan(ends[i])]
        rates = fill_slowly(
            capacities, {i: (arrivals[i][1].capacities, arrivals[i][1].max_rate) for i in moving}
        )
        due = [now + left[i] / rates[i] for i in moving] + [begin for begin in begins if begin > now]
        following = min(due)
        for i in moving:
            left[i] -= rates[i] * (following - now)
            if now + (left[i] + rates[i] * (following - now)) / rates[i] <= following * (1 + 1e-12):
                ends[i] = following
        now = following
    return ends


@settings(max_examples=150)
@given(
    CAPACITIES,
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.integers(1, 12),
            st.sets(st.integers(0, 5), min_size=1, max_size=3),
            st.sampled_from([0.5, 1.0, math.inf]),
            st.sampled_from([0.0, 0.5, 3.0]),
        ),
        min_size=1,
        max_size=10,
    ),
)
def test_flows_end_when_the_reference_says(
    capacities: list[float], drawn: list[tuple[int, int, set[int], float, float]]
) -> None:
    arrivals = [
        (
            at / 2,
            Flow(size, tuple(sorted({c % len(capacities) for c in way})), most, latency),
        )
        for at, size, way, most, latency in drawn
    ]
    expected = end_slowly(arrivals, capacities)
    assert end_of(arrivals, capacities) == pytest.approx(expected, rel=1e-6)


def test_two_flows_share_and_the_second_speeds_up_when_the_first_is_over() -> None:
    arrivals = [(0.0, Flow(4.0, (0,), math.inf)), (0.0, Flow(6.0, (0, 1), math.inf))]
    # At 1 each until 4 s, then 2 for the remaining 2 bytes.
    assert end_of(arrivals, [2.0, 10.0]) == [4.0, 5.0]


def test_a_flow_that_joins_others_of_its_kind_ends_by_its_own_bytes() -> None:
    late = (2.0, Flow(1.0, (0,), math.inf))
    # 1 a second until 2 s; then a half each until the late one is over at 4 s, and 1 for the last 3 bytes.
    assert end_of([(0.0, Flow(6.0, (0,), math.inf)), late], [1.0]) == [7.0, 4.0]


def test_kinds_without_limits_and_without_bytes_that_move() -> None:
    flows = [(1.0, Flow(5.0, (0,), math.inf)), (1.0, Flow(5.0, (0,), math.inf, latency_s=2.0))]
    assert end_of(flows, [math.inf]) == [1.0, 3.0]


def test_latency_comes_before_the_first_byte() -> None:
    arrivals = [(0.0, Flow(2.0, (0,), math.inf, latency_s=3.0)), (0.0, Flow(3.0, (0,), math.inf))]
    assert end_of(arrivals, [1.0]) == [5.0, 3.0]


def test_a_flow_without_bytes_takes_its_latency() -> None:
    assert end_of([(1.0, Flow(0.0, (0,), 1.0, latency_s=2.0)), (1.0, Flow(0.0, (), 1.0))], [1.0]) == [
        3.0,
        1.0,
    ]


def test_a_flow_over_no_capacity_has_its_own_rate() -> None:
    assert end_of([(0.0, Flow(6.0, (), 2.0))], [1.0]) == [3.0]
