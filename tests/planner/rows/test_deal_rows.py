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
from zorselike.planner.candidate.deal_rows import count_blocks, deal_candidate, list_orders
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.candidate.to_plan import make_plan
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.neighbours import move_rows

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


def list_types(candidate):
    return [[TYPE] * len(group.devices) for group in candidate.groups]


def deal(groups, num_devices=4, num_turns=1):
    """What each rank of each group gets, and the nodes they are on."""
    table = make_bench(num_devices, Link(1e9)).table
    owners = (*range(len(groups)),) * num_turns
    candidate = CandidatePlan(groups, owners, tuple(range(1, len(owners) + 1)))
    dealt = deal_candidate(
        candidate,
        table,
        [device // num_devices for device in range(64)],
        list_types(candidate),
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


def deal_both_ways(groups, num_devices=4):
    """Plans with rows dealt plainly and in blocks, and how many blocks."""
    bench = make_bench(num_devices, Link(5e9))
    candidate = CandidatePlan(groups, (*range(len(groups)),) * 2, (*range(1, 2 * len(groups)), 8))
    other = replace(candidate, deals_otherwise=True)
    own, others = count_blocks(candidate, bench.table, bench.problem.nodes, list_types(candidate))
    ways = dict(zip((own, others), (candidate, other), strict=True))
    num_blocks = max(ways)
    found = [make_plan(ways[number], bench.problem, bench.table).validate() for number in (1, num_blocks)]
    return bench, num_blocks, *found


@pytest.mark.parametrize(
    ("first", "second", "blocks"),
    [
        # 4 and 8 devices: four parts of one and two.
        (((8,),) * 4, ((2, 2),) * 8, 4),
        # 43 and 42 rows are not alike, and are dealt by themselves.
        (((5, 4),) * 2 + ((4, 3),) * 2, ((4,),) * 8, 2),
        # Those that hold shards only have no part in it.
        (((8,),) * 4 + ((),), ((4,),) * 8, 4),
    ],
)
def test_blocks_are_alike(first, second, blocks):
    devices = (*range(len(first)),), (*range(8, 8 + len(second)),)
    groups = tuple(
        CandidateGroup(own, Mode(), sizes) for own, sizes in zip(devices, (first, second), strict=True)
    )
    _, num_blocks, plain, in_blocks = deal_both_ways(groups)
    assert num_blocks == blocks and plain.groups != in_blocks.groups
    rows = 32 // blocks
    for group, own in zip(groups, in_blocks.groups, strict=True):
        of_blocks = [[own for own in own.microbatches if own.start // rows == b] for b in range(blocks)]
        assert all(piece.stop <= rows * (b + 1) for b, pieces in enumerate(of_blocks) for piece in pieces)
        ranks = [{piece.rank for piece in pieces} for pieces in of_blocks]
        assert not any(a & b for i, a in enumerate(ranks) for b in ranks[:i])
        sizes = [sorted(group.sizes[rank - min(own.flat_ranks)] for rank in part) for part in ranks]
        assert all(part == sizes[0] for part in sizes)
        shapes = [
            [(piece.start - rows * b, piece.stop - rows * b) for piece in of_blocks[b]] for b in range(blocks)
        ]
        assert all(shape == shapes[0] for shape in shapes)


def test_groups_that_cannot_be_cut_alike_are_dealt_in_one_way():
    groups = (
        CandidateGroup((0, 1, 2), Mode(), ((11,), (11,), (10,))),
        CandidateGroup((8, 9), Mode(), ((16,),) * 2),
    )
    bench = make_bench(4, Link(5e9))
    candidate = CandidatePlan(groups, (0, 1), (4, 8))
    counts = count_blocks(candidate, bench.table, bench.problem.nodes, list_types(candidate))
    assert counts == (1, 1)
    plans = [
        make_plan(replace(candidate, deals_otherwise=way), bench.problem, bench.table)
        for way in (False, True)
    ]
    assert plans[0] == plans[1]


def test_parts_of_blocks_are_simulated_once():
    """Two nodes of four that pass rows to two others: each part of a group does what every other does."""
    groups = make_groups((*range(8),), (*range(8, 16),))
    groups = (replace(groups[0], sizes=((3, 1),) * 8), replace(groups[1], sizes=((2, 2),) * 8))
    bench, num_blocks, _, plan = deal_both_ways(groups)
    assert num_blocks == 8
    setting = bench.problem.setting
    costs = setting.find_costs(plan)
    classes = setting.find_classes(plan, costs)
    assert classes is not None and len(classes.members) <= 4
    folded, whole = (setting.simulate(plan, costs, classes=own).simulation for own in (classes, None))
    assert folded.num_actions < whole.num_actions / 3
    assert folded.iteration_s == pytest.approx(whole.iteration_s, rel=1e-9)


@given(
    parts=st.lists(
        st.tuples(st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    num_blocks=st.integers(2, 4),
)
def test_moved_rows_keep_blocks_alike(parts, num_blocks):
    """Some parts of a group, each with its rows, so many times."""
    sizes = [tuple(sorted(own, reverse=True)) for number, own in parts for _ in range(number * num_blocks)]
    group = CandidateGroup(tuple(range(len(sizes))), Mode(), tuple(sizes))
    candidate = CandidatePlan((group,), (0,), (1,))
    kinds = [["T4"] * len(sizes)]
    for changed in move_rows(candidate, kinds, 8, num_blocks):
        (moved,) = changed.groups
        assert sum(map(sum, moved.sizes)) == sum(map(sum, sizes)) and moved.sizes != group.sizes
        assert all(number % num_blocks == 0 for number in Counter(moved.sizes).values())


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
