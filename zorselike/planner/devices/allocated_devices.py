"""The devices that Sailor's dynamic programme would take (section 4.2.2), by our costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, isfinite

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.planner.devices.node_kinds import NodeKind
from zorselike.planner.devices.pipeline_costs import MOST_POOLS, ModelTables, list_pools, make_problems
from zorselike.planner.groups.bandwidths import Bandwidths
from zorselike.planner.pipelines.allocation import AllocationGoal, find_allocation
from zorselike.planner.problem import PlanProblem

TIGHTER = (1.0, 0.8, 0.6)
"""Shares of what is allowed: the costs here are rough, and a little less may be what keeps a constraint."""


def allocate_devices(
    problem: PlanProblem,
    clock: LayerTimeModel,
    kinds: Sequence[NodeKind],
    bandwidths: Bandwidths,
    *,
    max_tried: int,
) -> list[tuple[int, ...]]:
    """What the programme takes for the problem's goal, and for somewhat stricter ones.

    Args:
        kinds: of the nodes that may be used, those with the fastest devices first.
        bandwidths: of their devices.
        max_tried: partial pipelines, of all goals together.

    Returns:
        Indices into `Cluster.places`, rising, each choice once; nothing where no pipeline was found.
    """
    pools = list_pools(kinds, problem.max_devices)[:MOST_POOLS]
    tables = ModelTables(problem, clock, bandwidths, pools)
    problems = tuple(make_problems(tables, problem))
    goals = list(_list_goals(problem))
    chosen: dict[tuple[int, ...], None] = {}
    for goal in goals:
        found = find_allocation(
            problems, [pool.pool for pool in pools], goal, max_tried=max_tried // len(goals)
        )
        if found is not None:
            used = {
                (pool.kind, pool.type): number
                for pool, number in zip(pools, found.figures.used, strict=True)
                if number
            }
            whole = _take_nodes(kinds, used)
            has_room = problem.max_devices is None or len(whole) <= problem.max_devices
            chosen[whole if has_room else _take(kinds, used)] = None
    return list(chosen)


def _list_goals(problem: PlanProblem) -> Iterator[AllocationGoal]:
    goal = AllocationGoal(
        objective=problem.objective,
        max_cost_per_iteration=problem.max_cost_per_iteration,
        min_throughput=problem.min_throughput,
        max_devices=problem.max_devices,
    )
    is_bound = isfinite(problem.max_cost_per_iteration) or problem.min_throughput > 0
    for share in TIGHTER if is_bound else TIGHTER[:1]:
        yield replace(
            goal,
            max_cost_per_iteration=share * problem.max_cost_per_iteration,
            min_throughput=problem.min_throughput / share,
        )


_Used = Mapping[tuple[int, str], int]
"""Devices by kind of node and type."""


def _take(kinds: Sequence[NodeKind], used: _Used) -> tuple[int, ...]:
    """Just as many, node after node."""
    taken = []
    for k, kind in enumerate(kinds):
        left = {device: used.get((k, device), 0) for device in kind.types}
        for node in kind.nodes:
            for device, device_type in zip(node, kind.types, strict=True):
                if left[device_type]:
                    left[device_type] -= 1
                    taken.append(device)
    return tuple(sorted(taken))


def _take_nodes(kinds: Sequence[NodeKind], used: _Used) -> tuple[int, ...]:
    """Whole nodes: idle devices of a rented node are paid for."""
    taken = []
    for k, kind in enumerate(kinds):
        num_nodes = max(
            ceil(used.get((k, device), 0) / kind.types.count(device)) for device in set(kind.types)
        )
        taken += [device for node in kind.nodes[:num_nodes] for device in node]
    return tuple(sorted(taken))
