"""Whether any plan of a tiny problem fits, by trying all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

from zorselike.errors import ClusterError
from zorselike.plan.plan import OFFLOAD_KINDS, GradReduce, Group, Plan, Recompute
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.simulator.simulated_plan import SimulatedPlan

from .every_plan import Options, Shape, list_shapes, make_plan
from .optimum import fits


@dataclass(frozen=True)
class _Way:
    """Options with which a group fits its devices."""

    group: Group
    host_bytes: Mapping[int, int]
    """Host memory by node."""


def count_tries(problem: PlanProblem) -> int:
    """How many plans `find_fit` looks at, at most."""
    return sum(1 for _ in list_shapes(problem)) * len(list(list_options(problem.fixed)))


def find_fit(problem: PlanProblem) -> SimulatedPlan | None:
    """A plan that fits every device and host, each group with options of its own; None where there is none.

    Time and money are not looked at. One row at once, ZeRO 2 and 3 only, and nothing beside reductions,
    unless that is fixed otherwise: larger microbatches, lower stages and overlapped reductions never need
    less.
    """
    for shape in list_shapes(problem):
        try:
            plan = _find_fitting(problem, shape)
        except ClusterError:
            continue  # Groups that nothing joins.
        if plan is not None:
            case = problem.setting.simulate(plan)
            if fits(case):
                return case
    return None


def list_options(fixed: Fixed) -> Iterator[Options]:
    """All combinations that may make a plan fit, within what is fixed."""
    all_offloads = chain.from_iterable(combinations(OFFLOAD_KINDS, n) for n in range(len(OFFLOAD_KINDS) + 1))
    offloads = list(all_offloads) if fixed.offload is None else [fixed.offload]
    recomputes: list[Recompute] = ["layer", "none"] if fixed.recompute is None else [fixed.recompute]
    for zero, grad_reduce in _list_stages(fixed):
        for recompute, offload in product(recomputes, offloads):
            yield Options(
                zero=zero,
                grad_reduce=grad_reduce,
                recompute=recompute,
                offload=offload,
                rows_per_microbatch=1,
                overlap_grad_reduce=bool(fixed.overlap_grad_reduce),
            )


def _list_stages(fixed: Fixed) -> list[tuple[int, GradReduce]]:
    stages: list[tuple[int, GradReduce]] = [(2, "microbatch"), (3, "microbatch"), (2, "once")]
    if fixed.zero in (0, 1):
        stages = [(fixed.zero, "once")]
    return [
        (zero, grad_reduce)
        for zero, grad_reduce in stages
        if fixed.zero in (None, zero) and fixed.grad_reduce in (None, grad_reduce)
    ]


def _find_fitting(problem: PlanProblem, shape: Shape) -> Plan | None:
    """A plan of which each group fits its devices and all together their hosts. What a rank holds does not
    depend on the options of other groups."""
    ways: list[list[_Way]] = [[] for _ in shape.groups]
    plan = None
    for options in list_options(problem.fixed):
        plan = make_plan(problem, shape, options)
        for g, way in _weigh(problem, plan):
            ways[g].append(way)
    if plan is None:
        return None
    for chosen in product(*(_keep_least(own) for own in ways)):
        if _fit_hosts(problem, chosen):
            return replace(plan, groups=tuple(way.group for way in chosen))
    return None


def _weigh(problem: PlanProblem, plan: Plan) -> Iterator[tuple[int, _Way]]:
    """The groups that fit their devices."""
    case = problem.setting.simulate(plan)
    for g, group in enumerate(plan.groups):
        if not any(case.is_overfull(rank) for rank in group.flat_ranks):
            host_bytes: dict[int, int] = {}
            for rank in group.flat_ranks:
                node = case.costs.places[rank].node
                held = case.simulation.memory[rank].host_peak_bytes
                host_bytes[node] = host_bytes.get(node, 0) + held
            yield g, _Way(group, host_bytes)


def _keep_least(ways: Sequence[_Way]) -> list[_Way]:
    """Without those that take no less of any host than another one."""
    kept: list[_Way] = []
    for way in ways:
        if not any(_takes_no_less(way, other) for other in kept):
            kept = [other for other in kept if not _takes_no_less(other, way)] + [way]
    return kept


def _takes_no_less(way: _Way, other: _Way) -> bool:
    return all(way.host_bytes[node] >= held for node, held in other.host_bytes.items())


def _fit_hosts(problem: PlanProblem, ways: Sequence[_Way]) -> bool:
    held: dict[int, int] = {}
    for way in ways:
        for node, num_bytes in way.host_bytes.items():
            held[node] = held.get(node, 0) + num_bytes
    limits = {node: problem.cluster.nodes[node].host_memory_bytes for node in held}
    return all(limit is None or held[node] <= limit for node, limit in limits.items())
