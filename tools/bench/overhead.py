"""What the runtime itself costs, on a small real Llama, and whether anything grows or leaks."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import statistics
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from zorselike import HeteroPipeline
from zorselike.models import build_model, get_config, module_names
from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action

from .contest import Bench
from .forked import run_forked
from .plans import spread_modules

NUM_RANKS = 4
NUM_ROWS = 16
SEQUENCE = 16
WARM_STEPS = 150
MIB = 2**20
MAX_GROWTH_BYTES = 2 * MIB
"""What counts as no growth: caches that fill up late, and the samples themselves."""


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
        shown = {f"{len(by_kind[kind])} actions": value}
        if kind in bare:
            shown["of which the layers themselves"] = bare[kind]
        bench.hold(f"  {kind} us", shown, worst=max)


def _time_actions(rank: int, num_steps: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = defaultdict(list)
    begin_ns = 0

    def enter(_: Action) -> None:
        nonlocal begin_ns
        begin_ns = time.thread_time_ns()

    def leave(action: Action) -> None:
        times[action.kind.value].append((time.thread_time_ns() - begin_ns) / 1000)

    plan = _plan(((0, 1, 2), (3,)), 2, 2)
    with _pipeline(plan) as pipe:
        _train(pipe, 5)
        with pipe.watching(enter, leave):
            _train(pipe, num_steps)
        _time_bare_layers(plan, rank, times)
    return dict(times)


def _time_bare_layers(plan: Plan, rank: int, times: dict[str, list[float]]) -> None:
    """One layer, times the layers of a ministage, with no runtime around it."""
    layer = build_model("llama", "debug").get_submodule("layers.1")
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
    num_first, num_steps = (WARM_STEPS // 3, 100) if bench.is_quick else (WARM_STEPS, 500)
    _hold_growth(bench, f"over_{num_steps}_steps", run_forked(_grow, NUM_RANKS, num_first, num_steps))


def _grow(rank: int, num_first: int, num_steps: int) -> Footprint:
    with _pipeline(_plan(((0, 1, 2), (3,)), 2, 2)) as pipe:
        _train(pipe, num_first)
        before = Footprint.now()
        _train(pipe, num_steps)
        return Footprint.now() - before


def run_cycles(bench: Bench) -> None:
    """Builds, trains and closes twenty pipelines of five plans in the same processes, after ten
    that do not count; and as many times plain FSDP2, because torch itself
    keeps something of every process group."""
    num_cycles = 10 if bench.is_quick else 20
    grown = run_forked(_cycle, NUM_RANKS, num_cycles)
    torchs = run_forked(_cycle_fsdp, NUM_RANKS, num_cycles)
    torchs_bytes = max(footprint.memory_bytes for footprint in torchs)
    _hold_growth(bench, f"over_{num_cycles}_pipelines", grown, torchs_bytes)
    kept = {f"rank {rank}": float(footprint.pipelines) for rank, footprint in enumerate(grown)}
    bench.hold("pipelines_alive", kept, 0, worst=max)


def _cycle(rank: int, num_cycles: int) -> Footprint:
    plans = [
        _plan(((0, 1, 2), (3,)), 2, 2),
        _plan(((0, 1), (2, 3)), 1, 1),
        _plan(((0, 1, 2, 3),), 2, 3),
        _plan(((0,), (1, 2, 3)), 2, 0),
        _plan(((0,), (1,), (2,), (3,)), 1, 2),
    ]
    alive: list[weakref.ref[HeteroPipeline]] = []

    def cycle(number: int) -> None:
        pipe = _pipeline(plans[number % len(plans)])
        _train(pipe, 2)
        pipe.close()
        alive.append(weakref.ref(pipe))

    grown = _grow_by(cycle, num_cycles // 2, num_cycles)
    return replace(grown, pipelines=sum(ref() is not None for ref in alive))


def _cycle_fsdp(rank: int, num_cycles: int) -> Footprint:
    def cycle(number: int) -> None:
        groups = [dist.new_group([0, 1, 2]), dist.new_group([3])]
        own = cast(dist.ProcessGroup, groups[rank == 3])
        mesh = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("dp",))
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            torch.autograd.backward(model(torch.randn(4, 64)).sum())
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        dist.destroy_process_group(own)

    return _grow_by(cycle, num_cycles // 2, num_cycles)


def _grow_by(cycle: Callable[[int], None], num_first: int, num_cycles: int) -> Footprint:
    """What `num_cycles` cycles add to what the first ones left."""
    for number in range(num_first):
        cycle(number)
    before = Footprint.now()
    for number in range(num_first, num_first + num_cycles):
        cycle(number)
    return Footprint.now() - before


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library."""

    _names_ = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names_.split())


def _allocated_bytes() -> int:
    """What the C library (glibc 2.33 or later) has allocated and not freed, tensors and all of torch; free
    memory kept for later is no leak."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    memory_bytes: int
    resident_bytes: int
    blocks: int
    """Blocks of Python's own allocator."""
    threads: int
    descriptors: int
    pipelines: int = 0

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        return cls(
            memory_bytes=_allocated_bytes(),
            resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE,
            blocks=sys.getallocatedblocks(),
            threads=len(list(Path("/proc/self/task").iterdir())),
            descriptors=len(list(Path("/proc/self/fd").iterdir())),
        )

    def __sub__(self, other: Footprint) -> Footprint:
        return Footprint(*(now - before for now, before in zip(astuple(self), astuple(other), strict=True)))


def _hold_growth(bench: Bench, suffix: str, grown: Sequence[Footprint], torchs_bytes: int = 0) -> None:
    """The worst rank counts; `torchs_bytes` is what torch itself keeps in as many cycles."""

    limit = round((torchs_bytes + MAX_GROWTH_BYTES) / MIB, 2)
    note = f" (plain FSDP2: {torchs_bytes / MIB:.2f})" if torchs_bytes else ""
    held: dict[str, tuple[float | None, list[float]]] = {
        f"memory_mib_{suffix}": (limit, [own.memory_bytes / MIB for own in grown]),
        f"  resident_mib_{suffix}": (None, [own.resident_bytes / MIB for own in grown]),
        f"  python_blocks_{suffix}": (None, [own.blocks for own in grown]),
        f"threads_{suffix}": (0, [own.threads for own in grown]),
        f"descriptors_{suffix}": (0, [own.descriptors for own in grown]),
    }
    for name, (target, values) in held.items():
        shown = note if name.startswith("memory") else ""
        by_rank = {f"rank {rank}{shown}": value for rank, value in enumerate(values)}
        bench.hold(name, by_rank, target, worst=max)


def _plan(groups: Sequence[Sequence[int]], ministages: int, zero: int) -> Plan:
    """The debug Llama over four ranks of unequal speed."""
    names = module_names(get_config("llama", "debug"))
    return spread_modules(
        names, groups, (3.0, 2.0, 1.0, 2.0), num_rows=NUM_ROWS, ministages=ministages, zero=zero
    )


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
