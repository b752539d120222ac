"""Our costs as the search for a pipeline asks for them, worked out by hand, and the devices it takes."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import pytest
from device_problems import SPEEDS, make_nodes, make_problem

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.plan.cluster.cluster import Link
from zorselike.plan.workload import Workload
from zorselike.planner.devices.node_kinds import NodeKind, find_node_kinds
from zorselike.planner.devices.pipeline_costs import (
    ModelPipelineCosts,
    ModelTables,
    StageOption,
    allocate_devices,
    count_state_bytes,
    list_pools,
    make_problems,
)
from zorselike.planner.groups.bandwidths import read_bandwidths
from zorselike.planner.pipelines.allocation import AllocationGoal, find_allocation
from zorselike.planner.problem import Fixed, PlanProblem

GIB = 2**30
ROW_BYTES = 1000 * 2
"""That cross a boundary."""

PROBLEM = make_problem(
    make_nodes("a", "A100-40 A100-40 A100-40 A100-40", copies=2, price=36.0, region="x"),
    make_nodes("t", "T4 T4", copies=2, price=7.2, region="y", nic=Link(2e6)),
    links={
        "region_links": {("x", "x"): Link(4e6), ("y", "y"): Link(2e6), ("x", "y"): Link(1e6)},
        "egress_price_per_gb": {("x", "y"): 1.0, ("y", "x"): 3.0, ("x", "x"): 0.5},
    },
)
FAST, SLOW, AGAIN = 0, 1, 2
"""Options: on A100, on T4, and on A100 with recomputation."""


def kinds_of(problem: PlanProblem) -> tuple[NodeKind, ...]:
    return find_node_kinds(read_bandwidths(problem.cluster), problem.usable, lambda type: 1 / SPEEDS[type])


def tables_of(problem: PlanProblem) -> ModelTables:
    clock = LayerTimeModel(problem.profile, problem.workload)
    return ModelTables(problem, clock, read_bandwidths(problem.cluster), list_pools(kinds_of(problem)))


def costs_of(problem: PlanProblem, degree: int, rows: int) -> ModelPipelineCosts:
    options = [StageOption(0, "none"), StageOption(1, "none"), StageOption(0, "layer")]
    return ModelPipelineCosts(tables_of(problem), options, degree, rows, problem.global_batch)


def test_compute_and_counts() -> None:
    costs = costs_of(PROBLEM, degree=4, rows=3)
    assert costs.num_layers == 8 and costs.num_microbatches == 6  # 64 rows, 12 at a time.
    assert costs.uses == ((4, 0), (0, 4), (4, 0))
    assert costs.layer_s(FAST, 0) == pytest.approx(3 / 4 / 8)
    assert costs.layer_s(SLOW, 7) == pytest.approx(3 / 8)
    assert costs.layer_s(AGAIN, 0) == pytest.approx(3 / 4 / 8 * 4 / 3)


def test_devices_of_a_node_send_at_once() -> None:
    costs = costs_of(PROBLEM, degree=4, rows=3)
    assert costs.forward_send_s(FAST, SLOW, 2, 0) == pytest.approx(3 * ROW_BYTES * 4 / 1e6)
    assert costs.backward_send_s(SLOW, FAST, 2, True) == pytest.approx(3 * ROW_BYTES * 2 / 1e6)
    assert costs.forward_send_s(FAST, AGAIN, 2, 0) == pytest.approx(3 * ROW_BYTES * 4 / 4e6)
    # Two stages of two devices are on one node.
    near = costs_of(PROBLEM, degree=2, rows=3)
    assert near.forward_send_s(FAST, FAST, 2, 0) == pytest.approx(3 * ROW_BYTES / 100e9)
    assert costs.least_send_s(FAST) <= costs.forward_send_s(FAST, FAST, 2, 0)


def test_gradients_are_scattered_and_parameters_gathered_over_a_ring() -> None:
    """Of two bytes a parameter and four a gradient, 7/8 over each edge."""
    assert costs_of(PROBLEM, degree=8, rows=1).sync_s(FAST, 0, 3) == pytest.approx(3e6 * 6 * 7 / 8 / 4e6)
    assert costs_of(PROBLEM, degree=4, rows=1).sync_s(FAST, 0, 3) == pytest.approx(3e6 * 6 * 3 / 4 / 100e9)
    assert costs_of(PROBLEM, degree=1, rows=1).sync_s(FAST, 0, 3) == 0


def test_money_is_egress_by_pair_of_zones() -> None:
    costs = costs_of(PROBLEM, degree=4, rows=1)
    assert costs.boundary_dollars(FAST, SLOW, 2) == pytest.approx(64 * ROW_BYTES * 4e-9)
    assert costs.sync_dollars(FAST, 0, 3) == 0
    ring = costs_of(PROBLEM, degree=8, rows=1)
    assert ring.sync_dollars(FAST, 0, 3) == pytest.approx(2 * 3e6 * 6 * 7 / 8 * 0.5e-9)


def test_memory_is_shards_and_held_activations() -> None:
    """18 bytes a parameter over 4 devices, and a megabyte of each layer and row."""
    layer = replace(PROBLEM.workload.kinds["layer"], num_parameters=2 * GIB)
    problem = replace(PROBLEM, workload=replace(PROBLEM.workload, kinds={"layer": layer}))
    assert count_state_bytes(problem.workload) == (2 * GIB * 18,) * 8
    costs = costs_of(problem, degree=4, rows=1)
    assert costs.fits(FAST, 0, 4, 1) and not costs.fits(FAST, 0, 5, 1)
    small = costs_of(
        replace(PROBLEM, global_batch=10**6, workload=heavy_workload(PROBLEM, 10**9)), degree=1, rows=4
    )
    assert small.fits(FAST, 0, 2, 5) and not small.fits(FAST, 0, 2, 6)
    assert small.fits(AGAIN, 0, 2, 6)
    for option in (FAST, SLOW, AGAIN):
        fitting = [small.fits(option, 0, 2, depth) for depth in range(1, 12)]
        assert fitting == sorted(fitting, reverse=True)


def heavy_workload(problem: PlanProblem, activation_bytes: int) -> Workload:
    layer = replace(problem.workload.kinds["layer"], activation_bytes_per_row=activation_bytes)
    return replace(problem.workload, kinds={"layer": layer})


def test_every_cost_is_finite_and_stages_do_not_get_cheaper_by_layers() -> None:
    """As the search demands of a cost model."""
    for problem in make_problems(tables_of(PROBLEM), PROBLEM):
        costs, options = problem.costs, range(len(problem.costs.uses))
        for a in options:
            for b in options:
                assert isfinite(costs.forward_send_s(a, b, 1, 0) + costs.backward_send_s(a, b, 1, False))
                assert costs.boundary_dollars(a, b, 1) >= 0
            for measure in (costs.update_s, costs.sync_s, costs.sync_dollars):
                grown = [measure(a, 0, stop) for stop in range(1, costs.num_layers + 1)]
                assert grown == sorted(grown) and all(map(isfinite, grown))


def test_degrees_and_rows_are_those_that_can_be() -> None:
    problems = list(make_problems(tables_of(PROBLEM), PROBLEM))
    assert {problem.degree for problem in problems} == {1, 2, 4, 8}
    assert all(sum(uses) == p.degree for p in problems for uses in p.costs.uses)
    assert {problem.rows for problem in problems if problem.degree == 8} == {1, 2, 4, 8}
    fixed = replace(PROBLEM, fixed=Fixed(rows_per_microbatch=2, recompute="layer"), global_batch=4)
    few = list(make_problems(tables_of(fixed), fixed))
    assert {(p.degree, p.rows) for p in few} == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)}
    assert all(len(p.costs.uses) <= 2 for p in few)


def allocate(problem: PlanProblem, max_tried: int = 20_000) -> list[tuple[int, ...]]:
    clock = LayerTimeModel(problem.profile, problem.workload)
    bandwidths = read_bandwidths(problem.cluster)
    return allocate_devices(problem, clock, kinds_of(problem), bandwidths, max_tried=max_tried)


def test_the_far_and_slow_are_left_out() -> None:
    (devices, *_) = allocate(PROBLEM)
    assert devices and max(devices) < 8


def test_whole_nodes_unless_so_many_are_not_allowed() -> None:
    assert all(len(devices) <= 3 for devices in allocate(replace(PROBLEM, max_devices=3)))
    cheap = allocate(replace(PROBLEM, objective="cost", min_throughput=0.05))
    assert cheap and all(cheap)


def test_a_search_ends_after_so_many_tries() -> None:
    tables = tables_of(PROBLEM)
    problems = tuple(make_problems(tables, PROBLEM))
    pools = [pool.pool for pool in tables.pools]
    whole = find_allocation(problems, pools, AllocationGoal())
    assert whole is not None and whole.is_exact
    assert find_allocation(problems, pools, AllocationGoal(), max_tried=0) is None
    for max_tried in (5, 20, 80):
        some = find_allocation(problems, pools, AllocationGoal(), max_tried=max_tried)
        if some is None or not some.is_exact:
            assert some is None or some.figures.iteration_s >= whole.figures.iteration_s
        else:
            assert some == whole
    assert find_allocation(problems, pools, AllocationGoal(), max_tried=10**9) == whole
