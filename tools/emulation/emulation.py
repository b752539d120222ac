"""Runs a plan on an emulated cluster and measures its steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal

import torch.distributed as dist

from zorselike import HeteroPipeline
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import Profile
from zorselike.plan.cluster.cluster import Cluster, Place
from zorselike.plan.plan import Plan
from zorselike.plan.workload import Workload
from zorselike.profiler.program.action_costs import ActionClock, ActionTime
from zorselike.runtime.memory_report import MemoryLine

from ..bench.forked import run_forked
from ..bench.sleeping import count_rows, squared_error
from ..report import num_cores
from .cut_layers import TP_PLAN, build_cut_model, count_tokens, make_token_rows
from .model import EmulatedDevice, SleepingAdamW, build_model, make_rows, pin
from .namespaces import Namespaces
from slow_links.buckets import BucketWires, lay_buckets
from slow_links.transport import LinkSleeper

Limit = Literal["sleep", "kernel", "none"]
"""What slows links: sleeping in the transport, `tbf` in network namespaces, or nothing."""

TIMEOUT_S = 240.0
"""The longest that one run may take, set-up included."""
SILENCE_S = 120.0
"""A rank on a crowded machine may be silent for long."""


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """A plan on a cluster that is not there."""

    plan: Plan
    workload: Workload
    cluster: Cluster
    profile: Profile
    """Times of the devices, without what this machine adds."""
    limit: Limit = "sleep"
    repeats: Mapping[str, int] = field(default_factory=dict)
    """How often layers multiply, by device type, each rank with a core to itself; empty: they sleep."""
    num_steps: int = 4
    """Timed ones, behind one that sets everything up and one that fills the pipeline, before one more."""

    @property
    def computes(self) -> bool:
        return bool(self.repeats)

    @property
    def places(self) -> tuple[Place, ...]:
        return self.cluster.place_ranks(self.plan)


@dataclass(frozen=True)
class RankRun:
    """What one rank saw."""

    end_s: tuple[float, ...]
    """Monotonic, of each step, the filling one first."""
    busy_s: tuple[float, ...]
    """Seconds of forwards and backwards in each timed step."""
    cpu_s: float
    """Processor seconds over all timed steps."""
    memory: tuple[MemoryLine, ...]
    actions: tuple[tuple[ActionTime, ...], ...] = ()
    """Actions of each timed step, if they were asked for."""


@dataclass(frozen=True)
class Measurement:
    """Steps of all ranks together."""

    ranks: tuple[RankRun, ...]

    @property
    def step_s(self) -> tuple[float, ...]:
        """Seconds from the end of one step on its last rank to that of the next."""
        ends = [max(times) for times in zip(*(rank.end_s for rank in self.ranks), strict=True)]
        return tuple(stop - start for start, stop in pairwise(ends))

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """The median of each rank."""
        return tuple(statistics.median(rank.busy_s) for rank in self.ranks)

    @property
    def cpu_share(self) -> float:
        """Processor time of all ranks over the time of all cores."""
        return sum(rank.cpu_s for rank in self.ranks) / (num_cores() * sum(self.step_s))


def run(emulation: Emulation, *, records: bool = False) -> Measurement:
    """Forks the ranks and runs the steps; `records`: every action's times too.

    Raises `RankFailedError` where a rank fails, `NamespaceError` where the kernel's limit is asked for
    and this machine does not allow it.
    """
    places = emulation.places
    wires = (
        BucketWires(lay_buckets(emulation.cluster, places), places) if emulation.limit == "sleep" else None
    )
    kernel = emulation.limit == "kernel"
    with Namespaces(emulation.cluster) if kernel else nullcontext() as namespaces:
        enter = partial(enter_node, namespaces, places) if namespaces is not None else None
        try:
            count = emulation.plan.num_ranks
            ranks = run_forked(_run_rank, count, emulation, wires, records, timeout_s=TIMEOUT_S, enter=enter)
        finally:
            if wires is not None:
                wires.close()
    return Measurement(tuple(ranks))


def enter_node(namespaces: Namespaces, places: Sequence[Place], rank: int) -> None:
    """Moves a rank's process to its node."""
    namespaces.enter(places[rank].node)


def _run_rank(rank: int, emulation: Emulation, wires: BucketWires | None, records: bool) -> RankRun:
    if emulation.computes:
        pin(rank)
    sleeper = None
    if wires is not None:
        sleeper = LinkSleeper(wires, rank)
        sleeper.install()
    device_type, workload = emulation.cluster.device_type(emulation.places[rank]), emulation.workload
    clock = None if emulation.computes else LayerTimeModel(emulation.profile, workload)
    degree = emulation.plan.replica_of(rank).degree
    repeats = emulation.repeats.get(device_type, 1)
    device = EmulatedDevice(clock, device_type, repeats=repeats, degree=degree)
    is_cut = emulation.plan.has_replicas
    with HeteroPipeline(
        build_cut_model(workload, device)
        if is_cut
        else build_model(workload, device, computes=emulation.computes),
        emulation.plan,
        tp_plan=TP_PLAN if is_cut else None,
        optimizer=lambda named: SleepingAdamW(named, device),
        loss_fn=squared_error,
        count_fn=count_tokens if is_cut else count_rows,
        device="cpu",
        silence_s=SILENCE_S,
    ) as pipe:
        return _time_steps(pipe, emulation, device, sleeper, records)


def _time_steps(
    pipe: HeteroPipeline,
    emulation: Emulation,
    device: EmulatedDevice,
    sleeper: LinkSleeper | None,
    records: bool,
) -> RankRun:
    make = make_token_rows if emulation.plan.has_replicas else make_rows
    inputs, targets = make(emulation.workload, len(pipe.input_rows), len(pipe.target_rows))
    pipe.step(inputs, targets)
    dist.barrier()
    # Nothing waits between the steps from here on: the pipeline fills once.
    device.is_awake = False
    if sleeper is not None:
        sleeper.is_on = True
    ends: list[float] = []
    busy: list[float] = []
    actions: list[tuple[ActionTime, ...]] = []
    cpu_s = 0.0
    for number in range(emulation.num_steps + 1):
        clock = ActionClock()
        cpu_begin_s = time.process_time()
        with clock.running(pipe) if records else nullcontext():
            pipe.step(inputs, targets)
        ends.append(time.monotonic())
        if number > 0:
            busy.append(pipe.busy_s)
            actions.append(tuple(clock.times))
            cpu_s += time.process_time() - cpu_begin_s
    pipe.step(inputs, targets)  # Uses links beside what ranks that end later still do.
    dist.barrier()
    if sleeper is not None:
        sleeper.is_on = False
    lines = pipe.memory_report().lines
    return RankRun(tuple(ends), tuple(busy), cpu_s, lines, tuple(actions) if records else ())
