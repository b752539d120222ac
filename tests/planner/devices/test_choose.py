"""Which devices are proposed, in what order, and what is left out because it cannot be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest
from clusters import small_clusters
from device_problems import SPEEDS, make_nodes, make_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from zorselike.plan.cluster.cluster import Cluster, Link
from zorselike.planner.answer import NothingFitsError
from zorselike.planner.devices.bounds import DeviceBounds
from zorselike.planner.devices.choose import propose_devices
from zorselike.planner.devices.mixes import mix_kinds
from zorselike.planner.devices.node_kinds import find_node_kinds
from zorselike.planner.groups.bandwidths import read_bandwidths
from zorselike.planner.problem import Fixed, PlanProblem


@settings(max_examples=40)
@given(cluster=small_clusters(), data=st.data())
def test_sets_are_of_the_usable_devices_and_keep_limits(cluster: Cluster, data: st.DataObject) -> None:
    usable = data.draw(st.sets(st.integers(0, cluster.num_devices - 1), min_size=1))
    max_devices = data.draw(st.none() | st.integers(1, len(usable)))
    problem = replace(
        make_problem(make_nodes("a", "T4")),
        cluster=cluster,
        devices=tuple(sorted(usable)),
        max_devices=max_devices,
    )
    found = propose_devices(problem, time_limit_s=0.02)
    bounds = DeviceBounds(problem)
    assert found and len({chosen.devices for chosen in found}) == len(found) <= 100
    for chosen in found:
        assert {*chosen.devices} <= usable and chosen.devices == tuple(sorted(chosen.devices))
        assert 0 < len(chosen.devices) <= (max_devices or inf)
        assert len(read_bandwidths(cluster, chosen.devices).connected_parts()) == 1
        assert chosen.bound_s == bounds.bound_s(chosen.devices)
        assert chosen.price_per_hour == bounds.price_per_hour(chosen.devices)
        assert not chosen.note
    assert found == propose_devices(replace(problem, cluster=replace(cluster)), time_limit_s=0.02)


MIXED = make_problem(
    make_nodes("a", "A100-40 A100-40 A100-40 A100-40", copies=2, zone="here", region="r"),
    make_nodes("v", "V100-16 V100-16", copies=3, zone="here", region="r"),
    make_nodes("t", "T4 T4", zone="there", region="r"),
)


def test_for_throughput_all_come_first_and_then_all_but_some() -> None:
    found = propose_devices(MIXED)
    assert found[0].devices == tuple(range(16))
    assert found[0].bound_s == pytest.approx(64 / (8 * 4 + 6 * 2 + 2))
    proposed = {chosen.devices for chosen in found}
    without_t4, only_a100, only_v100 = (tuple(range(*ends)) for ends in ((14,), (8,), (8, 14)))
    assert {without_t4, only_a100, only_v100, (0,)} <= proposed
    assert {tuple(range(4)), (0, 1, 2, 3, 8, 9)} <= proposed


def test_whole_nodes_come_first_when_few_devices_are_allowed() -> None:
    found = propose_devices(replace(MIXED, max_devices=6))
    assert found[0].devices == (0, 1, 2, 3, 4, 5)
    assert all(len(chosen.devices) <= 6 for chosen in found)


def test_nodes_that_are_joined_best_are_taken_together() -> None:
    """Two racks; their nodes take turns in the cluster."""
    nodes = make_nodes("n", "T4 T4", copies=6)
    racks = [(0, 2, 4), (1, 3, 5)]
    links = {(f"n{i}", f"n{j}"): Link(9e9) for rack in racks for i in rack for j in rack if i < j}
    problem = make_problem(nodes, links={"node_links": links, "default_link": Link(1e9)}, max_devices=6)
    chosen = propose_devices(problem)[0]
    assert chosen.devices in {(0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11)}


PRICED = make_problem(
    make_nodes("a", "A100-40 A100-40 A100-40 A100-40", copies=3, price=3600.0),
    make_nodes("v", "V100-16 V100-16", copies=3, price=1800.0),
    make_nodes("t", "T4 T4", copies=4, price=200.0),
)


@pytest.mark.parametrize("seed", range(8))
def test_the_best_mix_of_nodes_by_its_bounds_is_among_them(seed: int) -> None:
    """Of every mix of whole nodes, tried one by one."""
    draw = Random(seed)
    bounds = DeviceBounds(PRICED)
    mixes = list(every_mix(PRICED, bounds))
    costs = sorted(cost for _, cost in mixes)
    most = draw.choice(costs[len(costs) // 10 :])
    fastest = min(seconds for seconds, cost in mixes if cost <= most)
    found = propose_devices(replace(PRICED, max_cost_per_iteration=most * (1 + 1e-12)), time_limit_s=0.01)
    assert min(chosen.bound_s for chosen in found) <= fastest * (1 + 1e-5)
    assert all(chosen.bound_cost <= most * (1 + 1e-6) for chosen in found)
    slowest = draw.choice(sorted(seconds for seconds, _ in mixes))
    cheapest = min(cost for seconds, cost in mixes if seconds <= slowest)
    asked = replace(PRICED, objective="cost", min_throughput=(1 - 1e-12) / slowest)
    found = propose_devices(asked, time_limit_s=0.01)
    assert min(chosen.bound_cost for chosen in found) <= cheapest * (1 + 1e-5)
    assert all(chosen.bound_s <= slowest * (1 + 1e-6) for chosen in found)


def every_mix(problem: PlanProblem, bounds: DeviceBounds) -> list[tuple[float, float]]:
    found = []
    nodes = problem.cluster.nodes
    for taken in product((False, True), repeat=len(nodes)):
        devices = [device for device, place in enumerate(problem.cluster.places) if taken[place.node]]
        if devices:
            found.append((bounds.bound_s(devices), bounds.bound_cost(devices)))
    return found


def test_the_cheapest_node_comes_first_for_money() -> None:
    found = propose_devices(replace(PRICED, objective="cost"))
    assert found[0].bound_cost == pytest.approx(64 * 200 / 3600 / 2)
    assert found[0].devices[0] >= 18


def test_sets_that_cannot_hold_the_model_come_last() -> None:
    """Of a model of 16 bytes a parameter that fills half of all memory, on nodes of any size."""
    nodes = make_nodes("a", "A100-40", copies=4), make_nodes("t", "T4", copies=8)
    problem = make_problem(*nodes)
    layer = problem.workload.kinds["layer"]
    large = replace(layer, num_parameters=4 * 40 * 2**30 // 16 // 8)
    workload = replace(problem.workload, kinds={"layer": large})
    found = propose_devices(replace(problem, workload=workload))
    holds = [sum(39.4 if device < 4 else 14.6 for device in chosen.devices) >= 160 for chosen in found]
    assert holds == sorted(holds, reverse=True) and {True, False} == {*holds}


def test_unconnected_parts_are_proposed_apart() -> None:
    problem = make_problem(
        make_nodes("a", "A100-40 A100-40", copies=2, region="x"),
        make_nodes("t", "T4 T4", copies=2, region="y"),
        links={"region_links": {("x", "x"): Link(1e9), ("y", "y"): Link(1e9)}},
    )
    found = propose_devices(problem)
    sides = [{device < 4 for device in chosen.devices} for chosen in found]
    assert all(len(side) == 1 for side in sides) and {True} in sides and {False} in sides
    assert found[0].devices == (0, 1, 2, 3)
    assert found[0].note == (
        "no link joins nodes t0 and t1 (4 devices) to the 4 devices of the part that is planned for; "
        "they are left out, unless the cluster file gets a [[links]] for them or a default_link"
    )


def test_regions_are_not_proposed_together_where_groups_are_too_few() -> None:
    problem = make_problem(
        make_nodes("a", "A100-40 A100-40", region="x"), make_nodes("t", "T4 T4", region="y")
    )
    alone = replace(problem, fixed=Fixed(ministages=1))
    found = {chosen.devices for chosen in propose_devices(alone)}
    assert found and all({*devices} <= {0, 1} or {*devices} <= {2, 3} for devices in found)
    for wider in (replace(alone, spans_regions=True), replace(problem, fixed=Fixed(ministages=2))):
        assert (0, 1, 2, 3) in {chosen.devices for chosen in propose_devices(wider)}


def test_a_chain_of_nodes_is_not_proposed_without_its_middle() -> None:
    """The ends are joined over the node between them alone."""
    nodes = [make_nodes(name, "T4") for name in "abc"]
    links = {("a0", "b0"): Link(1e9), ("b0", "c0"): Link(1e9)}
    found = propose_devices(make_problem(*nodes, links={"node_links": links}))
    assert (0, 1, 2) in {chosen.devices for chosen in found}
    assert (0, 2) not in {chosen.devices for chosen in found}


def test_fixed_groups_are_the_only_devices() -> None:
    (chosen,) = propose_devices(replace(MIXED, fixed=Fixed(groups=((9, 8), (0, 1)))))
    assert chosen.devices == (0, 1, 8, 9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_throughput": 2.0}, r"at least 2 iterations/s .* 26 devices takes 0.9412 s .* 1\.062 iter"),
        ({"min_throughput": 0.2, "max_devices": 2}, r"of any 2 devices takes 8 s .* 0.125 iterations/s"),
        ({"max_cost_per_iteration": 1.0}, r"at most 1 USD .* alone costs 1\.778 USD"),
    ],
)
def test_what_no_plan_can_keep_is_refused(given: dict[str, float], message: str) -> None:
    problem = replace(PRICED, **given)  # type: ignore[arg-type]
    problem.check()
    with pytest.raises(NothingFitsError, match=message):
        propose_devices(problem)


def test_contradictory_constraints_leave_what_is_nearest() -> None:
    """Each can be kept, not both: whoever plans then says how near plans come."""
    problem = replace(PRICED, max_cost_per_iteration=2.0, min_throughput=0.9)
    assert propose_devices(problem)


@settings(max_examples=30)
@given(cluster=small_clusters(), max_devices=st.none() | st.integers(1, 6))
def test_bounds_of_mixes_are_those_of_their_devices(cluster: Cluster, max_devices: int | None) -> None:
    problem = replace(make_problem(make_nodes("a", "T4")), cluster=cluster)
    bounds = DeviceBounds(problem)
    kinds = find_node_kinds(read_bandwidths(cluster), problem.usable, bounds.model_s)
    assert sorted(device for kind in kinds for device in kind.devices) == [*problem.usable]
    mixes = mix_kinds(kinds, bounds, max_devices=max_devices)
    assert len(mixes.bound_s) > 0
    for i in range(len(mixes.bound_s)):
        mix = mixes[i]
        devices = [
            d for kind, n in zip(kinds, mix.num_nodes, strict=True) for node in kind.nodes[:n] for d in node
        ]
        if mix.part_kind >= 0:
            node = kinds[mix.part_kind].nodes[mix.num_nodes[mix.part_kind]]
            devices += node[: mix.part_devices]
        assert mixes.bound_s[i] == pytest.approx(bounds.bound_s(devices))
        assert mixes.price_per_hour[i] == pytest.approx(bounds.price_per_hour(devices))
        assert mixes.num_devices[i] == len(devices) <= (max_devices or inf)


def test_many_kinds_of_nodes_are_mixed_in_turn() -> None:
    """Twenty nodes of which none is like another, too many for every subset."""
    nodes = [make_nodes(f"n{i}-", "T4 " * (i % 3) + "V100-16", price=100.0 + i) for i in range(20)]
    problem = make_problem(*nodes, objective="cost")
    bounds = DeviceBounds(problem)
    kinds = find_node_kinds(read_bandwidths(problem.cluster), problem.usable, bounds.model_s)
    assert len(mix_kinds(kinds, bounds).bound_s) < 100
    found = propose_devices(problem)
    best = max(((i % 3) * SPEEDS["T4"] + SPEEDS["V100-16"]) / (100 + i) for i in range(20))
    assert found[0].bound_cost == pytest.approx(64 / best / 3600)
