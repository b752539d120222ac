"""What is wrong with a planner's answer, if anything, each plan built, checked and simulated anew."""

from __future__ import annotations

import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from zorselike.cost.catalogue import find_memory_bytes
from zorselike.plan.parts import may_overlap_reduction
from zorselike.plan.plan import Plan
from zorselike.planner.answer import PlanAnswer, Planned
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.paying import PAYS
from zorselike.planner.search.search import ONE_STEP
from zorselike.schedule import ScheduleSpec, check
from zorselike.simulator.simulated_plan import SimulatedPlan

LIMITED = 0.7
"""Below this share of the compute-bound limit a plan says what limits it."""
SAME = 1e-9
"""Relative difference of numbers that should be the same."""


def find_faults(problem: PlanProblem, answer: PlanAnswer) -> list[str]:
    """A line for each thing that is wrong.

    Raises:
        PlanError, ScheduleError: A plan is not valid, or its schedule does not check.
    """
    faults = [
        f"plan {number}: {fault}"
        for number, planned in enumerate(answer.plans)
        for fault in _examine(problem, planned)
    ]
    scores = [_score(problem, planned.case) for planned in answer.plans]
    if any(later < earlier * (1 - SAME) for earlier, later in pairwise(scores[1:])) or any(
        _comes_before(problem, planned.case, answer.best.case) for planned in answer.plans[1:]
    ):
        faults.append(f"plans are not in the order of what is asked for: {scores}")
    if len({planned.case.plan.fingerprint for planned in answer.plans}) < len(answer.plans):
        faults.append("the same plan twice")
    step_s = min(planned.case.simulation.iteration_s for planned in answer.plans)
    if answer.plans[0].is_first_step and ONE_STEP not in answer.notes:
        faults.append("its time is that of one step, and it does not say so")
    if not answer.progress.bound_s <= step_s * (1 + SAME):
        faults.append(f"the bound of {answer.progress.bound_s:.6g} s is above a step of {step_s:.6g} s")
    return faults


def _comes_before(problem: PlanProblem, case: SimulatedPlan, first: SimulatedPlan) -> bool:
    """Whether a plan is better than the first, which may be a little slower only where it costs less."""
    better, best = _score(problem, case), _score(problem, first)
    may_cost_less = problem.objective == "throughput" and problem.fixed.groups is None
    pays = not may_cost_less or best > better * (1 + PAYS) or first.simulation.cost >= case.simulation.cost
    return better < best * (1 - SAME) and pays


def _score(problem: PlanProblem, case: SimulatedPlan) -> float:
    return case.simulation.cost if problem.objective == "cost" else case.simulation.iteration_s


def _examine(problem: PlanProblem, planned: Planned) -> Iterator[str]:
    plan = planned.case.plan.validate()
    _check_schedule(problem, plan)
    case = problem.setting.simulate(plan, num_steps=1 if planned.is_first_step else None)
    yield from _examine_memory(case)
    yield from _examine_estimates(planned, case)
    yield from _examine_wishes(problem, case)
    yield from _examine_fixed(problem, plan)
    yield from _examine_replicas(problem, case)
    yield from _examine_file(plan)


def _check_schedule(problem: PlanProblem, plan: Plan) -> None:
    """What is trained and tied is read from the workload itself, not by what made the schedule."""
    workload, home = problem.workload, plan.ministage_of
    spec = ScheduleSpec(
        plan,
        trainable=tuple(
            any(workload.kind_of[module].trains for module in ministage.modules)
            for ministage in plan.ministages
        ),
        ties=tuple((home[a], home[b]) for a, b in workload.ties if home[a] != home[b]),
        defer_steps=problem.defer_updates,
        masters=workload.masters,
    )
    check(spec, problem.setting.list_actions(plan))


def _examine_memory(case: SimulatedPlan) -> Iterator[str]:
    for rank in range(case.plan.num_ranks):
        if case.is_overfull(rank):
            yield f"{case.describe_rank(rank)}: {case.peak_bytes[rank]} of {case.limit_bytes(rank)} bytes"
    for node in sorted({place.node for place in case.costs.places}):
        if case.is_host_overfull(node):
            host = case.cluster.nodes[node]
            yield f"node {host.name}: {case.host_bytes[node]} of {host.host_memory_bytes} bytes of its host"


def _examine_estimates(planned: Planned, case: SimulatedPlan) -> Iterator[str]:
    """Whether the plan promises what it does, and says why it does no more."""
    estimates, simulation = case.plan.estimates, case.simulation
    for name, promised, found in (
        ("step", estimates.iteration_s, simulation.iteration_s),
        ("cost", estimates.cost_per_iteration, simulation.cost),
        ("share of the ideal", estimates.share_of_ideal, planned.ideal_s / simulation.iteration_s),
        ("step in the answer", planned.case.simulation.iteration_s, simulation.iteration_s),
    ):
        # A cluster without prices has no cost to promise.
        if promised is None and name == "cost" and not found:
            continue
        if promised is None or not math.isclose(promised, found, rel_tol=SAME):
            yield f"its {name} is promised as {promised}, simulated as {found}"
    if estimates.peak_memory_bytes != case.peak_bytes:
        yield f"memory is promised as {estimates.peak_memory_bytes}, simulated as {case.peak_bytes}"
    share = planned.share_of_ideal
    if not 0 < share <= 1 + SAME:
        yield f"it reaches {share:.4f} of the ideal, which nothing can exceed"
    if share < LIMITED and not (estimates.limited_by and all(estimates.limited_by)):
        yield f"it reaches {share:.0%} of the ideal and names no cause"


def _examine_wishes(problem: PlanProblem, case: SimulatedPlan) -> Iterator[str]:
    """Devices, money and time."""
    cluster, simulation = problem.cluster, case.simulation
    used = [cluster.places.index(place) for place in case.costs.places]
    if outside := sorted({*used} - {*problem.usable}):
        yield f"devices {outside} may not be used"
    if problem.max_devices is not None and len(used) > problem.max_devices:
        yield f"{len(used)} devices, more than {problem.max_devices}"
    if simulation.cost > problem.max_cost_per_iteration * (1 + SAME):
        yield f"it costs {simulation.cost:g}, more than {problem.max_cost_per_iteration:g}"
    if 1 / simulation.iteration_s < problem.min_throughput * (1 - SAME):
        yield f"{1 / simulation.iteration_s:g} iterations/s, fewer than {problem.min_throughput:g}"
    plan = case.plan
    if plan.global_batch != problem.global_batch:
        yield f"{plan.global_batch} rows a step, not {problem.global_batch}"
    if not problem.spans_regions and problem.fixed.groups is None:
        for g, group in enumerate(plan.groups):
            regions = {cluster.nodes[case.costs.places[rank].node].region for rank in group.flat_ranks}
            if len(regions) > 1:
                yield f"group {g} spans regions {sorted(regions)}"


def _examine_fixed(problem: PlanProblem, plan: Plan) -> Iterator[str]:
    """Whether what the user wants kept is kept."""
    fixed, places = problem.fixed, problem.cluster.places
    if fixed.groups is not None:
        rank_places = problem.cluster.place_ranks(plan)
        wanted = [{places[device] for device in group} for group in fixed.groups]
        found = [{rank_places[rank] for rank in group.flat_ranks} for group in plan.groups]
        first_visits = list(dict.fromkeys(ministage.group for ministage in plan.ministages))
        if [found[g] for g in first_visits] != wanted:
            yield f"groups {found} in the order {first_visits}, fixed are {wanted}"
    if fixed.ministages is not None and plan.num_ministages != fixed.ministages:
        yield f"{plan.num_ministages} ministages, fixed are {fixed.ministages}"
    if fixed.bounds_in_flight not in (None, plan.bounds_in_flight):
        yield f"bounds in flight: {plan.bounds_in_flight}, fixed is {fixed.bounds_in_flight}"
    for g, group in enumerate(plan.groups):
        rows = max(microbatch.num_rows for microbatch in group.microbatches)
        if fixed.rows_per_microbatch is not None and rows > fixed.rows_per_microbatch:
            yield f"group {g}: microbatches of {rows} rows, fixed are {fixed.rows_per_microbatch} at most"
        if fixed.offload is not None and {*group.offload} != {*fixed.offload}:
            yield f"group {g}: offloads {group.offload}, fixed is {fixed.offload}"
        may_overlap = may_overlap_reduction(group.zero, len(group.flat_ranks))
        if may_overlap and fixed.overlap_grad_reduce not in (None, group.overlap_grad_reduce):
            yield f"group {g}: overlap_grad_reduce is {group.overlap_grad_reduce}, fixed is another"
        reduces = "microbatch" if group.reduces_per_microbatch else "once"
        for key, value, wanted_value in (
            ("zero", group.zero, fixed.zero),
            ("grad_reduce", reduces, fixed.grad_reduce),
            ("recompute", group.recompute, fixed.recompute),
        ):
            if wanted_value not in (None, value):
                yield f"group {g}: {key} is {value}, fixed is {wanted_value}"


def _examine_replicas(problem: PlanProblem, case: SimulatedPlan) -> Iterator[str]:
    """Whether replicas are such as can be run, and as large as is fixed."""
    fixed, workload, cluster = problem.fixed.tensor_parallel, problem.workload, problem.cluster
    most = min(workload.max_tensor_parallel, workload.sequence_length, fixed or 8)
    for g, group in enumerate(case.plan.groups):
        alike: Counter[object] = Counter()
        degrees: defaultdict[object, list[int]] = defaultdict(list)
        for replica in group.replicas:
            places = [case.costs.places[rank] for rank in replica.ranks]
            kinds = {(place.node, cluster.device_type(place)) for place in places}
            if replica.degree not in (1, 2, 4, 8) or replica.degree > most or len(kinds) > 1:
                yield f"group {g}: a replica of {replica.degree} devices on {kinds}, {most} are allowed"
            memory = find_memory_bytes(cluster, places[0])
            alike[*kinds, memory] += replica.degree
            degrees[*kinds, memory].append(replica.degree)
        for kind, number in alike.items() if fixed is not None else ():
            largest = max(degree for degree in (1, 2, 4, 8) if degree <= min(fixed or 1, number))
            if max(degrees[kind]) != largest or (min(degrees[kind]) < largest and number % largest == 0):
                yield f"group {g}: replicas of {degrees[kind]} devices, fixed are {fixed}"


def _examine_file(plan: Plan) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        plan.save(path)
        if Plan.load(path) != plan:
            yield "it reads back from its file as another plan"
