"""What this machine itself costs an emulation: measured by runs of its own, never by scored ones.

Processor time per kind of action, how much longer a sleep takes than asked, and the time of Gloo's
transfers and collectives by number of ranks.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zorselike.cost.profile import Collective, LayerTimes, Overheads, Profile, Source, UpdateTime
from zorselike.plan.cluster.cluster import Cluster, Node
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.plan.workload import LayerKind, Workload
from zorselike.profiler.program.action_costs import FEW_UNITS, MANY_UNITS, ActionSamples, Seconds, draw_lines
from zorselike.schedule.actions import COMPUTE

from ..bench.forked import run_forked
from .emulation import Emulation, run
from .noise import straighten
from slow_links.transport import collective_names

OPS: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")
GLOO_BYTES = (4_096, 65_536, 524_288, 2_097_152)
SLEEP_S = 0.02
"""Sleep of one layer in the runs whose actions are timed: caches are cold then, as in a scored run."""
REPEATS = 9


@dataclass(frozen=True)
class GlooTimes:
    """Seconds of one operation of so many ranks against the whole buffer's bytes."""

    op: str
    """A collective, or `transfer`."""
    num_ranks: int
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class HostConstants:
    """What one machine adds to a run."""

    sleep_overshoot_s: float
    """How much longer a sleep takes than asked."""
    after_sleep: Overheads
    """Processor seconds of the thread that runs actions, on ranks that sleep: their caches are cold."""
    awake: Overheads
    """The same on ranks that compute."""
    gloo: tuple[GlooTimes, ...]

    def gloo_s(self, op: str, num_ranks: int, num_bytes: float) -> float:
        """Seconds of an operation on links that nothing limits, between what was measured."""
        times = sorted((own for own in self.gloo if own.op == op), key=lambda own: own.num_ranks)
        by_ranks = [float(np.interp(num_bytes, own.num_bytes, own.seconds)) for own in times]
        return float(np.interp(num_ranks, [own.num_ranks for own in times], by_ranks))


def measure_constants() -> HostConstants:
    """Takes some ten seconds for each number of ranks of Gloo."""
    overshoot = statistics.median(run_forked(_oversleep, 4))
    after_sleep, awake = (measure_actions(sleep_s) for sleep_s in (SLEEP_S, 0.0))
    gloo = tuple(times for num_ranks in (2, 4, 8, 16) for times in measure_gloo(num_ranks))
    return HostConstants(overshoot, after_sleep, awake, gloo)


def _oversleep(rank: int) -> float:
    found = []
    for _ in range(20):
        begin_s = time.monotonic()
        time.sleep(SLEEP_S)
        found.append(time.monotonic() - begin_s - SLEEP_S)
    return statistics.median(found)


# -- Gloo ----------------------------------------------------------------------------------


def measure_gloo(
    num_ranks: int,
    *,
    num_bytes: Sequence[int] = GLOO_BYTES,
    repeats: int = REPEATS,
    enter: Callable[[int], None] | None = None,
) -> tuple[GlooTimes, ...]:
    """Medians of the collectives of so many ranks, and of a transfer from the first to the second;
    `enter(rank)` comes first on each, such as moving to its node."""
    ranks: list[dict[str, tuple[float, ...]]] = run_forked(
        _time_gloo, num_ranks, tuple(num_bytes), repeats, enter=enter
    )
    return tuple(
        GlooTimes(
            op,
            num_ranks,
            tuple(num_bytes),
            straighten(max(seconds) for seconds in zip(*(own[op] for own in ranks), strict=True)),
        )
        for op in (*OPS, "transfer")
    )


def _time_gloo(rank: int, num_bytes: tuple[int, ...], repeats: int) -> dict[str, tuple[float, ...]]:
    found: dict[str, list[float]] = defaultdict(list)
    for size in num_bytes:
        for op, do in _operations(rank, size).items():
            found[op].append(_time(do, repeats))
    return {op: tuple(seconds) for op, seconds in found.items()}


def _operations(rank: int, num_bytes: int) -> dict[str, Callable[[], Any]]:
    world = dist.get_world_size()
    part = torch.zeros(max(1, num_bytes // 4 // world))
    whole = torch.zeros(part.numel() * world)
    names = collective_names()

    def transfer() -> None:
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)

    return {
        "all_gather": lambda: getattr(dist, names["all_gather"])(whole, part),
        "reduce_scatter": lambda: getattr(dist, names["reduce_scatter"])(part, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
        "transfer": transfer,
    }


def _time(do: Callable[[], Any], repeats: int) -> float:
    do()
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        begin_s = time.monotonic()
        do()
        seconds.append(time.monotonic() - begin_s)
    return statistics.median(seconds)


# -- actions -------------------------------------------------------------------------------


def measure_actions(sleep_s: float) -> Overheads:
    """Overheads from runs of the real runtime on four ranks whose layers sleep so long: with few layers in
    each ministage and with many; with ZeRO 2, and with ZeRO 3, where computations gather and reduce."""
    zero2, zero3 = (
        draw_lines(*(_time_actions(count, sleep_s, zero=zero) for count in (FEW_UNITS, MANY_UNITS)))
        for zero in (2, 3)
    )
    return Overheads(
        action_s=tuple(zero2.action_s.items()),
        unit_s=tuple(zero2.unit_s.items()),
        shared_unit_s=tuple(
            (kind.value, max(0.0, zero3.unit_s[kind] - zero2.unit_s[kind])) for kind in sorted(COMPUTE)
        ),
        source=Source("measured"),
    )


def _time_actions(num_layers: int, sleep_s: float, *, zero: int) -> Seconds:
    workload = uniform_workload(4 * num_layers)
    emulation = Emulation(
        plan=_plan(workload, num_layers, zero),
        workload=workload,
        cluster=Cluster(nodes=(Node(name="host", devices=(_DEVICE,) * 4),)),
        profile=uniform_profile(workload, sleep_s),
        limit="none",
        num_steps=4,
    )
    samples = ActionSamples(is_cpu=True)
    for own in run(emulation, records=True).ranks:
        for step in own.actions:
            samples.add_step(step)
    return samples.means()


_DEVICE = "CPU"


def uniform_workload(num_layers: int, *, elements: int = 1024, num_parameters: int = 16_384) -> Workload:
    """Layers that are all alike."""
    kind = LayerKind(
        name="layer",
        num_parameters=num_parameters,
        forward_flops_per_row=1e6,
        input_elements_per_row=elements,
        output_elements_per_row=elements,
        activation_bytes_per_row=4 * elements,
    )
    layers = tuple((f"layers.{i}", "layer") for i in range(num_layers))
    return Workload(
        model="emulated", sequence_length=1, dtype="float32", layers=layers, kinds={"layer": kind}
    )


def uniform_profile(workload: Workload, seconds: float) -> Profile:
    """Every pass of every layer takes the same, and updates nothing."""
    source = Source("given")
    layer = LayerTimes(
        kind="layer",
        device=_DEVICE,
        dtype=workload.dtype,
        sequence_length=workload.sequence_length,
        rows=(1, 64),
        forward_s=(seconds, seconds),
        backward_s=(seconds, seconds),
        source=source,
    )
    update = UpdateTime(device=_DEVICE, dtype=workload.dtype, seconds_per_parameter=0.0, source=source)
    return Profile(model=workload.model, layers=(layer,), updates=(update,))


def _plan(workload: Workload, num_layers: int, zero: int) -> Plan:
    """Two groups of two ranks, two ministages each; everything that an action exists for."""
    names = [name for name, _ in workload.layers]
    groups = tuple(
        Group(
            ranks=ranks,
            microbatches=tuple(Microbatch(ranks[i % 2], 2 * i, 2 * i + 2) for i in range(4)),
            zero=zero,
            offload=("params", "optimizer", "activations"),
        )
        for ranks in ((0, 1), (2, 3))
    )
    ministages = tuple(
        Ministage(i % 2, tuple(names[i * num_layers : (i + 1) * num_layers])) for i in range(4)
    )
    return Plan(global_batch=8, groups=groups, ministages=ministages).validate()
