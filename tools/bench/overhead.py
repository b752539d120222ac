"""What the runtime itself costs, on a small real Llama, and whether anything grows or leaks."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zorselike import HeteroPipeline
from zorselike.models import Llama, build_model, get_config, module_names
from zorselike.plan.plan import Plan
from zorselike.runtime.executor import Executor
from zorselike.schedule.actions import Action, Kind

from .contest import Bench
from .forked import run_forked
from .plans import spread_modules

NUM_RANKS = 4
NUM_ROWS = 16
SEQUENCE = 16
WARM_STEPS = 20
MAX_GROWTH_BYTES = 2 * 2**20
"""Resident memory of a process breathes by so much without anything being kept."""


def run_overhead(bench: Bench) -> None:
    """Processor time of one action in the thread that runs them: waiting does not count.

    The median over all actions of all ranks is the figure; that of `F` and `B` contains the
    layers themselves, so theirs is given with the same layers bare beside it.
    """
    num_steps = 10 if bench.is_quick else 40
    ranks = run_forked(_time_actions, NUM_RANKS, num_steps)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for times in ranks:
        for kind, values in times.items():
            by_kind[kind] += values
    bare = {kind: statistics.median(by_kind.pop(f"bare {kind}")) for kind in ("F", "B")}
    everything = list(itertools.chain.from_iterable(by_kind.values()))
    medians = {kind: statistics.median(values) for kind, values in sorted(by_kind.items())}
    bench.hold("python_us_per_action", {f"of {len(everything)} actions": statistics.median(everything)})
    for kind, value in medians.items():
        values = {f"{len(by_kind[kind])} actions": value}
        if kind in bare:
            values["of which the layers themselves"] = bare[kind]
        bench.hold(f"  {kind} us", values, worst=max)


def _time_actions(rank: int, num_steps: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = defaultdict(list)
    run_action = Executor._do

    def timed(self: Executor, action: Action, run: Any) -> None:
        begin_ns = time.thread_time_ns()
        run_action(self, action, run)
        times[action.kind.value].append((time.thread_time_ns() - begin_ns) / 1000)

    plan = _plan(((0, 1, 2), (3,)), 2, 2)
    with _pipeline(plan) as pipe:
        _train(pipe, 5)
        Executor._do = timed  # type: ignore[method-assign]
        _train(pipe, num_steps)
        Executor._do = run_action  # type: ignore[method-assign]
        _time_bare_layers(plan, rank, times)
    return dict(times)


def _time_bare_layers(plan: Plan, rank: int, times: dict[str, list[float]]) -> None:
    """One layer, times the layers of a ministage, with no runtime around it."""
    layer = _model().layers["1"]
    own = [m for i in plan.ministages_of_rank(rank) for m in plan.ministages[i].modules]
    num_layers = sum(name.startswith("layers.") for name in own) / len(plan.ministages_of_rank(rank))
    config = get_config("llama", "debug")
    x = torch.randn(plan.microbatches_of_rank(rank)[0].num_rows, SEQUENCE, config.dim, requires_grad=True)
    for _ in range(50):
        begin_ns = time.thread_time_ns()
        y = layer(x)
        middle_ns = time.thread_time_ns()
        y.backward(y.detach())
        times["bare F"].append((middle_ns - begin_ns) / 1000 * num_layers)
        times["bare B"].append((time.thread_time_ns() - middle_ns) / 1000 * num_layers)


def run_growth(bench: Bench) -> None:
    """Memory, threads and file descriptors before and after 500 steps."""
    num_steps = 500
    grown = run_forked(_grow, NUM_RANKS, num_steps)
    _hold_growth(bench, f"over_{num_steps}_steps", grown)


def _grow(rank: int, num_steps: int) -> Footprint:
    with _pipeline(_plan(((0, 1, 2), (3,)), 2, 2)) as pipe:
        _train(pipe, WARM_STEPS)
        before = Footprint.now()
        _train(pipe, num_steps)
        return Footprint.now() - before


def run_cycles(bench: Bench) -> None:
    """Builds, trains and closes twenty pipelines of different plans in the same processes, after
    a first round with each of the plans."""
    grown = run_forked(_cycle, NUM_RANKS, 20)
    _hold_growth(bench, "over_20_pipelines", grown)


def _cycle(rank: int, num_cycles: int) -> Footprint:
    plans = [
        _plan(((0, 1, 2), (3,)), 2, 2),
        _plan(((0, 1), (2, 3)), 1, 1),
        _plan(((0, 1, 2, 3),), 2, 3),
        _plan(((0,), (1, 2, 3)), 2, 0),
        _plan(((0,), (1,), (2,), (3,)), 1, 2),
    ]
    alive: list[weakref.ref[HeteroPipeline]] = []
    before = Footprint.now()
    for number, plan in enumerate(itertools.islice(itertools.cycle(plans), len(plans) + num_cycles)):
        if number == len(plans):
            before = Footprint.now()
        pipe = _pipeline(plan)
        _train(pipe, 2)
        pipe.close()
        alive.append(weakref.ref(pipe))
        del pipe
    gc.collect()
    kept = sum(ref() is not None for ref in alive)
    return Footprint.now(pipelines=kept) - before


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    resident_bytes: int
    threads: int
    descriptors: int
    objects: int
    pipelines: int = 0

    @classmethod
    def now(cls, pipelines: int = 0) -> Footprint:
        gc.collect()
        tasks, descriptors = Path("/proc/self/task"), Path("/proc/self/fd")
        if not tasks.exists():  # Not Linux: what Python itself knows.
            return cls(0, threading.active_count(), 0, len(gc.get_objects()), pipelines)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(list(tasks.iterdir())),
            len(list(descriptors.iterdir())),
            len(gc.get_objects()),
            pipelines,
        )

    def __sub__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.resident_bytes - other.resident_bytes,
            self.threads - other.threads,
            self.descriptors - other.descriptors,
            self.objects - other.objects,
            self.pipelines - other.pipelines,
        )


def _hold_growth(bench: Bench, suffix: str, grown: Sequence[Footprint]) -> None:
    """The worst rank counts."""

    def of_ranks(values: Iterator[float]) -> dict[str, float]:
        return {f"rank {rank}": value for rank, value in enumerate(values)}

    mebibytes = of_ranks(f.resident_bytes / 2**20 for f in grown)
    bench.hold(f"memory_mib_{suffix}", mebibytes, MAX_GROWTH_BYTES / 2**20, worst=max)
    bench.hold(f"threads_{suffix}", of_ranks(f.threads for f in grown), 0, worst=max)
    bench.hold(f"descriptors_{suffix}", of_ranks(f.descriptors for f in grown), 0, worst=max)
    bench.hold(f"objects_{suffix}", of_ranks(f.objects for f in grown), worst=max)
    if suffix.endswith("pipelines"):
        bench.hold(f"pipelines_alive_{suffix}", of_ranks(f.pipelines for f in grown), 0, worst=max)


def _plan(groups: Sequence[Sequence[int]], ministages: int, zero: int) -> Plan:
    """The debug Llama over four ranks of unequal speed."""
    names = module_names(get_config("llama", "debug"))
    return spread_modules(
        names, groups, (3.0, 2.0, 1.0, 2.0), num_rows=NUM_ROWS, ministages=ministages, zero=zero
    )


def _model() -> Llama:
    model = build_model("llama", "debug")
    assert isinstance(model, Llama)
    return model


def _pipeline(plan: Plan) -> HeteroPipeline:
    with torch.device("meta"):
        model = build_model("llama", "debug")
    return HeteroPipeline(model, plan, device="cpu")


def _train(pipe: HeteroPipeline, num_steps: int) -> None:
    rows = torch.randint(0, 256, (NUM_ROWS, SEQUENCE + 1))
    for step in range(num_steps):
        result = pipe.step_global(rows[:, :-1], rows[:, 1:])
        if step % 10 == 9:
            assert result.loss > 0  # Read now and then, as a trainer does.
