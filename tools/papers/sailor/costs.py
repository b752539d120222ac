"""What a run of Sailor's costs by the profiles beside it: no constant of time is fitted.

The runs are DeepSpeed's pipelines: 1F1B, every transfer blocks both its ends on their compute streams,
gradients are all-reduced in one flat buffer after the last backward, and the optimizer steps after that.
One rank of the plan stands for one GPU of a tensor-parallel replica: times of its degree, its own part of
the gradients, its own share of the machine's link. Over that goes the whole boundary, as in DeepSpeed's
pipelines by default; where types of GPUs are mixed, the engine that Sailor made for it sends of each rank
only its part (their deepspeed/pipe_engine.py: `PartitionedTensor` around outputs and gradients).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.sizes import MinistageBytes
from zorselike.cost.step_costs import StepCosts, UnitBytes
from zorselike.cost.wires import make_network
from zorselike.plan.plan import Plan
from zorselike.plan.workload import LayerKind, Workload
from zorselike.schedule.actions import Action
from zorselike.schedule.lowering.lower import lower
from zorselike.schedule.orders.one_f_one_b import one_f_one_b_blocking
from zorselike.schedule.spec import ScheduleSpec
from zorselike.simulator import Simulation, simulate

from .library import Library
from .links import Place
from .profiles import DEVICES
from .runs import MeasuredRun, to_cluster, to_plan

WEIGHT, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes a parameter of training in fp32 with Adam."""
DEEPSPEED_COPIES = 8
"""Bytes a parameter that Sailor's memory model adds for DeepSpeed: 4 for communication and 4 for the copy
that it makes when it starts (section 4.3, `mul_factor`; their runtime_simulator.py)."""


@dataclass(frozen=True)
class Prepared:
    """A run, ready to be simulated."""

    plan: Plan
    actions: Mapping[int, list[Action]]
    costs: StepCosts


def prepare(run: MeasuredRun, library: Library, model: str) -> Prepared:
    """The run's plan, schedule and costs; memory without what is fitted to runs.

    Raises:
        ProfileError: A profile is missing, or is of another model.
        ClusterError: No bandwidth is known between two machines.
    """
    profile = library.profile(model, run.gpus)
    plan = to_plan(run).validate()
    cluster = to_cluster(run, library.links)
    replicas = [replica for stage in run.stages for replica in stage.replicas]
    workloads = {t: library.workload(model, t) for t in sorted({r.tensor_parallel for r in replicas})}
    clocks = {t: LayerTimeModel(profile, workload) for t, workload in workloads.items()}
    forward, backward, update, sizes = {}, {}, {}, []
    rows = run.microbatch_rows
    for rank, replica in enumerate(replicas):
        ministage = plan.ministages_of_rank(rank)[0]
        kinds = kinds_of(plan, ministage, workloads[replica.tensor_parallel])
        clock = clocks[replica.tensor_parallel]
        forward[rank, ministage, rows] = _sum(clock, "forward", kinds, replica, rows)
        backward[rank, ministage, rows] = _sum(clock, "backward", kinds, replica, rows)
        update[rank, ministage] = clock.update_s(DEVICES[replica.gpu], sum(k.num_parameters for k in kinds))
        sizes.append({ministage: _size(kinds)})
    places = cluster.place_ranks(plan)
    costs = StepCosts(
        places=places,
        network=make_network(cluster, places),
        forward_s=forward,
        backward_s=backward,
        update_s=update,
        row_bytes=tuple(_row_bytes(run, plan, workloads)),
        units=tuple(_unit(run, plan, i, workloads) for i in range(plan.num_ministages)),
        sizes=tuple(sizes),
        transfers_block=True,
        assumptions=tuple(line for clock in clocks.values() for line in clock.assumptions),
    )
    spec = ScheduleSpec(plan)
    return Prepared(plan, lower(spec, one_f_one_b_blocking(spec)), costs)


def simulate_run(prepared: Prepared) -> Simulation:
    """One step of a steady run."""
    return simulate(prepared.plan, prepared.actions, prepared.costs)


def kinds_of(plan: Plan, ministage: int, workload: Workload) -> list[LayerKind]:
    """The layers of a ministage."""
    return [workload.kind_of[module] for module in plan.ministages[ministage].modules]


def _sum(clock: LayerTimeModel, which: str, kinds: list[LayerKind], replica: Place, rows: int) -> float:
    read = clock.forward_s if which == "forward" else clock.backward_s
    device, degree = DEVICES[replica.gpu], replica.tensor_parallel
    return sum(read(kind.name, device, rows, "none", degree) for kind in kinds)


def _size(kinds: list[LayerKind]) -> MinistageBytes:
    """Boundaries go through buffers that DeepSpeed keeps, which are in the overhead."""
    num_parameters = sum(kind.num_parameters for kind in kinds)
    return MinistageBytes(
        gathered_bytes=WEIGHT * num_parameters,
        shard_bytes=0,
        gradient_bytes=GRADIENT * num_parameters,
        gradient_shard_bytes=GRADIENT * num_parameters,
        state_bytes=(MOMENTS + DEEPSPEED_COPIES) * num_parameters,
        activation_bytes_per_row=sum(kind.activation_bytes_per_row for kind in kinds),
    )


def _row_bytes(run: MeasuredRun, plan: Plan, workloads: Mapping[int, Workload]) -> list[int]:
    """Bytes of a row that enters each stage: what one tensor-parallel rank sends of the layer before."""
    row_bytes = [0]
    for i in range(1, plan.num_ministages):
        degree = run.stages[i - 1].replicas[0].tensor_parallel
        last = kinds_of(plan, i - 1, workloads[degree])[-1]
        parts = degree if len(run.gpus) > 1 else 1
        row_bytes.append(last.output_elements_per_row * workloads[degree].itemsize // parts)
    return row_bytes


def _unit(run: MeasuredRun, plan: Plan, i: int, workloads: Mapping[int, Workload]) -> tuple[UnitBytes, ...]:
    """One flat buffer; of replicas of several degrees the largest part goes the slowest way."""
    parts = [
        WEIGHT * sum(kind.num_parameters for kind in kinds_of(plan, i, workloads[replica.tensor_parallel]))
        for replica in run.stages[i].replicas
    ]
    return (UnitBytes(max(parts), max(parts)),)
