"""Answers of a planner that only compares plans by proportion, with which what is printed can be tested."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, Profile, Source
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Device, Estimates
from zorselike.plan.workload import LayerKind, Workload
from zorselike.planner.answer import Ending, NothingFitsError, OnProgress, PlanAnswer, Planned, Progress
from zorselike.planner.by_shares import GroupBy, SharesJob, plan_shares
from zorselike.planner.problem import PlanProblem
from zorselike.simulator.report.speeds import measure_speeds

LAYERS = tuple(f"layers.{i}" for i in range(4))
WORKLOAD = Workload(
    model="chain",
    sequence_length=100,
    dtype="float32",
    layers=tuple((name, "layer") for name in LAYERS),
    kinds={
        "layer": LayerKind(
            name="layer",
            num_parameters=1000,
            forward_flops_per_row=1e9,
            input_elements_per_row=1000,
            output_elements_per_row=1000,
            activation_bytes_per_row=10**6,
        )
    },
)
CLUSTER = Cluster(
    nodes=(
        Node(name="a", devices=("A100-40",), zone="x", region="r", price_per_hour=3.0),
        Node(name="b", devices=("T4", "T4"), fabric=Link(1e10), zone="y", region="r", price_per_hour=0.6),
    ),
    default_link=Link(1e9),
    name="home",
)
TIMES = {"A100-40": 0.1, "T4": 0.4}


def measure(*devices: str) -> Profile:
    """A profile of the layers of `WORKLOAD` on these types of device."""
    return Profile(
        model="chain",
        layers=tuple(
            LayerTimes(
                kind="layer",
                device=device,
                dtype="float32",
                sequence_length=100,
                rows=(1, 8),
                forward_s=(TIMES[device], 8 * TIMES[device]),
                backward_s=(2 * TIMES[device], 16 * TIMES[device]),
                source=Source("measured", date="2026-11-21"),
            )
            for device in devices
        ),
    )


def plan_by_shares(
    problem: PlanProblem, group_by: GroupBy = "type", *, ministages: int = 1, zero: int = 2, rows: int = 1
) -> Planned:
    """A plan of the devices that may be used, simulated, with its estimates in it."""
    clock = LayerTimeModel(problem.profile, problem.workload)
    job = SharesJob(
        global_batch=problem.global_batch,
        group_by=group_by,
        ministages=ministages,
        rows_per_microbatch=rows,
        zero=zero,
    )
    plan = plan_shares(problem.workload, _keep(problem), clock, job)
    plan = replace(
        plan,
        cluster_fingerprint=problem.cluster.fingerprint,
        devices=tuple(_find_again(problem, device) for device in plan.devices),
    )
    case = problem.setting.simulate(plan)
    estimates = Estimates(
        iteration_s=case.simulation.iteration_s,
        peak_memory_bytes=case.peak_bytes,
        cost_per_iteration=case.simulation.cost or None,
    )
    speeds = measure_speeds(plan, problem.workload, problem.cluster, clock)
    planned = replace(plan, estimates=estimates)
    return Planned(
        case=replace(case, plan=planned),
        grouping=f"by {'device type' if group_by == 'type' else 'node'}",
        ideal_s=problem.global_batch / sum(speeds),
    )


def search_by_shares(
    problem: PlanProblem,
    *,
    budget_s: float = 30.0,
    top: int = 5,
    seed: int = 0,
    on_progress: OnProgress | None = None,
    all_devices: bool = False,
    workers: int = 1,
    ending: Ending = "finished",
    notes: Iterable[str] = (),
) -> PlanAnswer:
    """In place of `search_plans`: a few plans by proportion, the best first."""
    problem.check()
    plans = [
        plan_by_shares(problem, "type"),
        plan_by_shares(problem, "type", ministages=2),
        plan_by_shares(problem, "node", zero=1, rows=2),
    ]
    plans.sort(key=lambda planned: planned.case.simulation.iteration_s)
    best = plans[0].case.simulation
    if any(plans[0].case.is_overfull(rank) for rank in range(plans[0].case.plan.num_ranks)):
        raise NothingFitsError("plan: nothing fits; with 1.0 GiB more on each T4 something would")
    progress = Progress(
        elapsed_s=0.1,
        num_estimated=3,
        num_simulated=3,
        best_s=best.iteration_s,
        best_cost=best.cost or None,
        bound_s=plans[0].ideal_s,
    )
    if on_progress is not None:
        on_progress(progress)
    return PlanAnswer(plans=tuple(plans[:top]), progress=progress, ending=ending, notes=tuple(notes))


def _keep(problem: PlanProblem) -> Cluster:
    """The devices that may be used, as a cluster of their own; links are not looked at for a plan."""
    nodes = []
    for node in problem.cluster.nodes:
        devices = tuple(node.devices[local_rank] for local_rank in _usable_on(problem, node.name))
        if devices:
            nodes.append(replace(node, devices=devices, memory_bytes=(), zone="", region=""))
    return Cluster(nodes=tuple(nodes), default_link=Link(1e9))


def _find_again(problem: PlanProblem, device: Device) -> Device:
    """A device of that cluster as it is in the whole one."""
    return replace(device, local_rank=_usable_on(problem, device.node)[device.local_rank])


def _usable_on(problem: PlanProblem, node: str) -> list[int]:
    """Local ranks."""
    places = [problem.cluster.places[device] for device in problem.usable]
    return [place.local_rank for place in places if problem.cluster.nodes[place.node].name == node]
