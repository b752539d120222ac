"""Which rows go to which device: as much over every pair of nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from searched_problems import Bench, make_decoder

from zorselike.cost.profile import Profile
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan
from zorselike.planner.candidate.deal_rows import deal_candidate, list_orders
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.candidate.to_plan import make_plan
from zorselike.planner.problem import PlanProblem

TYPE = "A100-40"


def make_bench(num_devices, link):
    """16 devices, each pair of nodes joined by a link of its own; each half of them by fast ones."""
    names = [f"n{i}" for i in range(16 // num_devices)]
    nodes = tuple(Node(name=name, devices=(TYPE,) * num_devices, fabric=Link(100e9)) for name in names)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    links = {(a, b): link for a in halves[0] for b in halves[1]}
    return Bench(
        PlanProblem(
            workload=make_decoder(6),
            cluster=Cluster(nodes=nodes, node_links=links, default_link=Link(100e9)),
            profile=Profile(model="decoder"),
            global_batch=32,
        )
    )


def make_groups(*devices, **changes):
    """Of 32 rows, a row a microbatch."""
    return tuple(
        CandidateGroup(own, Mode(), ((1,) * (32 // len(own)),) * len(own), **changes) for own in devices
    )


def count_pairs(dealt, nodes, a, b):
    """Rows between nodes of two groups."""
    found = Counter()
    owner = [{row: nodes[own.rank] for own in dealt[g] for row in range(own.start, own.stop)} for g in (a, b)]
    for row, node in owner[0].items():
        found[node, owner[1][row]] += 1
    return found


def deal(groups, num_devices=4, num_turns=1):
    """What each rank of each group gets, and the nodes they are on."""
    table = make_bench(num_devices, Link(1e9)).table
    owners = (*range(len(groups)),) * num_turns
    candidate = CandidatePlan(groups, owners, tuple(range(1, len(owners) + 1)))
    dealt = deal_candidate(
        candidate,
        table,
        [device // num_devices for device in range(64)],
        [[TYPE] * len(group.devices) for group in candidate.groups],
    )
    return dealt, [device // num_devices for own in groups for device in own.devices]


@given(nodes=st.lists(st.integers(0, 4), min_size=1, max_size=24))
def test_orders_hold_every_position_once(nodes):
    orders = list_orders(nodes)
    assert orders[0] == (*range(len(nodes)),)
    for order in orders:
        assert sorted(order) == [*range(len(nodes))]


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_any_two_orders_spread_each_nodes_rows_over_all_nodes(num_nodes):
    nodes = [position // num_nodes for position in range(num_nodes * num_nodes)]
    orders = list_orders(nodes)
    assert len(orders) == 3
    for i, one in enumerate(orders):
        for other in orders[:i]:
            met = Counter((nodes[a], nodes[b]) for a, b in zip(one, other, strict=True))
            assert set(met.values()) == {1} and len(met) == num_nodes**2


def test_two_groups_use_all_pairs_of_nodes():
    devices = (*range(8),), (*range(8, 16),)
    dealt, nodes = deal(make_groups(*devices))
    assert count_pairs(dealt, nodes, 0, 1) == {(a, b): 8 for a in (0, 1) for b in (2, 3)}


def test_groups_that_are_visited_in_turns_use_all_pairs_of_nodes():
    devices = (*range(4),), (*range(4, 8),), (*range(8, 12),)
    dealt, nodes = deal(make_groups(*devices), num_devices=2, num_turns=2)
    for a, b in ((0, 1), (1, 2), (2, 0)):
        assert len(count_pairs(dealt, nodes, a, b)) == 4, (a, b)


def test_groups_that_share_nodes_keep_rows_inside():
    dealt, nodes = deal(make_groups((0, 1, 4, 5), (2, 3, 6, 7)))
    assert {*count_pairs(dealt, nodes, 0, 1)} == {(0, 0), (1, 1)}


def test_rounds_stay_rounds():
    dealt, _ = deal(make_groups((*range(8),), (*range(8, 16),), max_in_flight=2))
    for ranks, own in zip((range(8), range(8, 16)), dealt, strict=True):
        assert len(own) == 32
        for start in range(0, len(own), 8):
            assert {piece.rank for piece in own[start : start + 8]} == {*ranks}


def test_a_step_is_faster_than_with_rows_in_plain_order():
    """Where each pair of nodes has a link of its own, half of them would be idle."""
    bench = make_bench(4, Link(2e8))
    candidate = CandidatePlan(make_groups((*range(8),), (*range(8, 16),)), (0, 1), (4, 8))
    plan = make_plan(candidate, bench.problem, bench.table).validate()
    first = plan.groups[0]
    straight = tuple(replace(own, rank=own.rank + 8) for own in first.microbatches)
    plain = replace(plan, groups=(first, replace(plan.groups[1], microbatches=straight))).validate()
    spread_s, plain_s = (bench.problem.setting.simulate(own).simulation.iteration_s for own in (plan, plain))
    assert spread_s < 0.75 * plain_s
