"""How fast a job is once a card is lost, beside the best that those who are left could do; what mirrors cost.

Ranks pretend to be unequal devices by sleeping (`tools.emulation`), each on a node of its own behind a card
that the kernel limits. They hold, move and mirror real state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.elastic.contingency import SearchPlanner
from zorselike.elastic.contract import Member
from zorselike.elastic.deciding.decisions import Situation
from zorselike.plan.plan import Plan

from ..bench.sleeping import count_rows, squared_error
from ..emulation.emulation import Emulation
from ..emulation.emulation import run as run_emulated
from ..emulation.model import EmulatedDevice, SleepingAdamW, build_model, make_rows
from ..emulation.namespaces import Namespaces
from ..emulation.scenarios import Scenario, make_cluster, make_profile, make_workload
from ..report import Figure
from .injection import Fault
from .jobs import Job, JobFailedError, Outcome, run

UNIT_S = 0.012
"""Of a row through a layer on the slowest device; the others are two to four times as fast."""
_LIKELY_PLAN_S, _BEST_PLAN_S = 3.0, 20.0
"""Searches of the job, and of what it is measured against."""
_STEPS_BEFORE, _STEPS_AFTER = 24, 36
_NOT_YET = 8
"""Steps of a generation until mirrors have their interval, and pipelines are warm."""
_SHARE_TARGET = 0.95

SCENARIO = Scenario(
    name="elastic",
    nodes=(("A100-80",), ("A100-40",), ("V100-32",), ("T4",)),
    groups=((0, 1, 2, 3),),
    layers=(12,),
    num_rows=24,
    num_microbatches=6,
    nic_mb_per_s=60.0,
    layer_parameters=400_000,
)


@dataclass(frozen=True)
class EmulatedJob(Job):
    """Each member is a node of an emulated cluster."""

    emulation: Emulation | None = None
    namespaces: Namespaces | None = None
    device: EmulatedDevice = field(default_factory=lambda: EmulatedDevice(None))
    """Of this process, once it has entered its node."""

    @property
    def _emulation(self) -> Emulation:
        assert self.emulation is not None
        return self.emulation

    def make_model(self) -> nn.Module:
        return build_model(self._emulation.workload, self.device)

    def make_options(self) -> dict[str, Any]:
        return {
            "optimizer": lambda named: SleepingAdamW(list(named), self.device),
            "loss_fn": squared_error,
            "count_fn": count_rows,
        }

    def make_rows(self, rows_seen: int) -> tuple[Tensor, Tensor]:
        rows = self.plan.global_batch
        inputs, targets = make_rows(self._emulation.workload, rows, rows)
        assert inputs is not None and targets is not None
        return inputs, targets

    def place_of(self, member: int) -> tuple[int, int]:
        return member, 0

    def host_of(self, member: int) -> str:
        return f"10.213.0.{member + 1}"

    def enter_node(self, member: int) -> None:
        assert self.namespaces is not None
        self.namespaces.enter(member)
        cluster = self._emulation.cluster
        model = LayerTimeModel(self._emulation.profile, self._emulation.workload)
        device = EmulatedDevice(model, cluster.device_type(cluster.places[member]))
        device.is_awake = False
        object.__setattr__(self, "device", device)


def make_emulation() -> Emulation:
    """The cluster, its best plan, and a profile that says how fast it is."""
    workload, cluster = make_workload(SCENARIO), make_cluster(SCENARIO)
    nodes = tuple(replace(node, name=f"node{i}") for i, node in enumerate(cluster.nodes))
    emulation = Emulation(
        plan=Plan(SCENARIO.num_rows, (), ()),
        workload=workload,
        cluster=replace(cluster, nodes=nodes),
        profile=make_profile(SCENARIO, workload, UNIT_S),
        limit="kernel",
        num_steps=_STEPS_BEFORE,
    )
    return replace(emulation, plan=find_plan(emulation, range(len(nodes)), _BEST_PLAN_S))


def find_plan(emulation: Emulation, nodes: Any, budget_s: float) -> Plan:
    """The best plan of some nodes."""
    members = tuple(Member(f"{i}", i, "", 0, f"node{i}", 0, "cpu", 0) for i in nodes)
    return make_planner(emulation, budget_s)(Situation(emulation.plan, (), members)).plan


def make_planner(emulation: Emulation, budget_s: float) -> SearchPlanner:
    return SearchPlanner(
        emulation.workload,
        emulation.cluster,
        emulation.profile,
        emulation.plan.global_batch,
        budget_s=budget_s,
    )


def put_in_order(emulation: Emulation) -> Emulation:
    """The same with nodes in the order of the plan's ranks, of which a plan of CPU ranks need not speak."""
    plan, cluster = emulation.plan, emulation.cluster
    nodes = tuple(cluster.nodes[place.node] for place in cluster.place_ranks(plan))
    return replace(emulation, plan=replace(plan, devices=()), cluster=replace(cluster, nodes=nodes))


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Of ranks that are forked meanwhile."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)


def measure_loss(lost: int, *, mirror_share: float) -> dict[str, Any]:
    """A job that loses the node of this number, beside plain runs of the plan that it had before and of the
    best one for who is left.

    Raises:
        JobFailedError: It was not gone on, or the loss undid more steps than was promised.
    """
    emulation = make_emulation()
    with Namespaces(emulation.cluster) as namespaces, _quiet_threads():
        rank = next(device.rank for device in emulation.plan.devices if device.node == f"node{lost}")
        job = EmulatedJob(
            emulation.plan,
            len(emulation.workload.layers),
            _STEPS_BEFORE + _STEPS_AFTER,
            (Fault(_STEPS_BEFORE, rank, "kill", 0.5),),
            mirror_every=None,
            silence_s=20.0,
            planner=make_planner(emulation, _LIKELY_PLAN_S),
            mirror_share=mirror_share,
            emulation=emulation,
            namespaces=namespaces,
        )
        outcome = run(job)
    left = [i for i in range(len(emulation.cluster.nodes)) if i != lost]
    best = replace(emulation, plan=find_plan(emulation, left, _BEST_PLAN_S))
    steps = list_steps(outcome)
    ((lost_s, *_),) = outcome.happened
    first = max(generation for _, generation, at_s in steps if at_s < lost_s)
    last = max(generation for _, generation, _ in steps)
    own_before_s, own_after_s = mean_step_s(steps, first), mean_step_s(steps, last)
    ran = replace(emulation, plan=find_plan_of(outcome, first))
    before_s, best_s = (fmean(run_emulated(put_in_order(each)).step_s[2:]) for each in (ran, best))
    intervals = {report.interval for report in outcome.reports}
    (recovery_s,) = outcome.recoveries()
    return {
        "lost": lost,
        "mirror_share": mirror_share,
        "mirror_every": max(intervals),
        "steps_lost": max(report.num_lost for report in outcome.reports),
        "at_most_lost": max(report.at_most_lost for report in outcome.reports),
        "generations_after": len({generation for _, generation, _ in steps if generation > first}),
        "recovery_s": recovery_s,
        "before_s": own_before_s,
        "before_without_mirrors_s": before_s,
        "after_s": own_after_s,
        "best_s": best_s,
        "share_after_loss": best_s / own_after_s,
        "mirror_cost": own_before_s / before_s - 1,
    }


def find_plan_of(outcome: Outcome, generation: int) -> Plan:
    """What a survivor has run in it."""
    report = max(outcome.reports, key=lambda report: len(report.diary.finished))
    generations = list(dict.fromkeys(number for _, _, number in report.diary.finished))
    return Plan.parse(report.plans[-len(generations) :][generations.index(generation)])


def list_steps(outcome: Outcome) -> list[tuple[int, int, float]]:
    """Steps of the job with their generation, and when the last rank had done them, in order."""
    ends: dict[tuple[int, int], float] = {}
    for diary in outcome.diaries:
        for step, at_s, generation in diary.finished:
            ends[generation, step] = max(ends.get((generation, step), 0.0), at_s)
    return [(step, generation, at_s) for (generation, step), at_s in sorted(ends.items())]


def mean_step_s(steps: list[tuple[int, int, float]], generation: int) -> float:
    """Of a generation's steps, once it is warm: the mean, since only some of them wait for mirrors."""
    ends = [at_s for _, own, at_s in steps if own == generation]
    times = [b - a for a, b in pairwise(ends)][_NOT_YET:]
    if len(times) < _NOT_YET:
        raise JobFailedError(f"generation {generation} had {len(ends)} steps, too few to be timed")
    return fmean(times) if times else math.nan


def describe_losses(found: list[dict[str, Any]]) -> list[Figure]:
    """Beside what was asked for."""
    figures = []
    for each in found:
        name = f"{each['lost']}, {each['mirror_share']:g}"
        figures += [
            Figure(
                f"share_after_loss ({name})",
                each["share_after_loss"],
                _SHARE_TARGET,
                note=f"{each['best_s']:.3f} s of {each['after_s']:.3f} s a step",
            ),
            Figure(
                f"mirror_cost ({name})",
                each["mirror_cost"],
                each["mirror_share"],
                at_most=True,
                note=f"every {each['mirror_every']} steps, {each['before_s']:.3f} s a step",
            ),
        ]
    figures.append(Figure("share_after_loss", min(each["share_after_loss"] for each in found), _SHARE_TARGET))
    return figures
