"""What needs several cards, one process each: under torchrun, or started here. On a CPU three Gloo ranks."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS
from zorselike.runtime.alarm import stall
from zorselike.schedule.actions import Action

from ...bench.forked import run_forked
from .part import Record, SkipPart
from .training import TINY, Outcome, Training, device_of, in_line, one_group, train, train_alone

_CPU_RANKS = 3
_STALL_S = 20.0
"""At one place for so long, in steps of milliseconds, a rank hangs."""
_PORTS = {"edges": 1, "sleeps": 2, "capped": 3}
"""Beside torchrun's own port, one for each part: keys of a store are used once."""


def run_edges(record: Record) -> None:
    """Groups in line over NCCL (and Gloo where a cycle could close), and one group of all: as one process."""
    exact = _make_training(record)
    size = _count_ranks(record)
    sizes = (size - size // 2, size // 2)
    plans = {
        f"groups of {sizes} in line, offloaded: {' '.join(offload) or 'nothing'}": in_line(
            exact, sizes, offload=offload
        )
        for offload in ((), OFFLOAD_KINDS)
    }
    zeros = (3,) if record.is_small else range(4)
    plans |= {f"one group of {size}, ZeRO {zero}": one_group(exact, ranks=size, zero=zero) for zero in zeros}
    found = _run(record, "edges", _train_all, exact, plans)
    expected = found[0][-1]
    for name, outcome in zip(plans, found[0][:-1], strict=True):
        record.check(f"{name}: as one process", not (missed := outcome.misses(expected)), missed)


def run_sleeps(record: Record) -> None:
    """Many steps while hosts sleep at random: no hang, and the numbers stay."""
    exact = replace(_make_training(record), num_steps=4 if record.is_small else 200)
    size = _count_ranks(record)
    plan = in_line(exact, (size - size // 2, size // 2), offload=OFFLOAD_KINDS)
    begin_s = time.monotonic()
    found = _run(record, "sleeps", _train_sleeping, exact, plan)
    still, sleeping = found[0]
    missed = sleeping.misses(still, tolerance=1e-8)
    record.check(f"{exact.num_steps} steps with random sleeps: as without", not missed, missed)
    record.say(f"{time.monotonic() - begin_s:.0f} s for both runs")


def run_capped(record: Record) -> None:
    """Less and less memory until the allocator has to give back and ask again: the numbers stay."""
    if record.is_small:
        record.leave_out("the allocator retries", "a CPU's allocator has no limit; the steps run without")
    training = replace(_make_training(record), num_steps=4 if record.is_small else 12)
    size = _count_ranks(record)
    plan = in_line(training, (size - size // 2, size // 2), offload=OFFLOAD_KINDS)
    found = _run(record, "capped", _train_capped, training, plan)
    free, capped, _ = found[0]
    missed = capped.misses(free, tolerance=1e-8)
    record.check("with memory capped after every second step: as without", not missed, missed)
    retries = [each[2] for each in found]
    record.put("num_retries", retries)
    record.say(f"allocator's retries by rank: {retries}")
    if not record.is_small:
        record.check("the allocator retries", any(retries), "it never had to: the cap was too high")


def _make_training(record: Record) -> Training:
    base = TINY if record.is_small else Training(dim=128, num_layers=6, sequence=64)
    return replace(base, is_double=True)


def _count_ranks(record: Record) -> int:
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if record.settings.device == "cpu":
        return _CPU_RANKS
    # Where there is no NVML, who counts has touched CUDA, and none whom it forks afterwards may.
    (found,) = run_forked(_count_cards, 1)
    if found < 2:
        raise SkipPart(f"needs two cards, this machine has {found}: NCCL refuses two ranks on one")
    return min(found, 8)


def _count_cards(rank: int) -> int:
    return torch.cuda.device_count()


def _run(record: Record, name: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """By rank: forked here, or this very process where torchrun has started one for each card."""
    kind = record.settings.device
    if "WORLD_SIZE" not in os.environ:
        return run_forked(fn, _count_ranks(record), kind, *args, timeout_s=record.patience_s)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + _PORTS[name]
    wait = timedelta(seconds=record.left_s)
    store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=wait)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    found: list[Any] = [None] * size
    dist.all_gather_object(found, fn(rank, kind, *args))
    dist.barrier()
    return found


def _local_device(kind: str, rank: int) -> torch.device:
    """This rank's; from now on it says on the page early where it hangs."""
    stall.LIMIT_S = _STALL_S
    return device_of(kind, int(os.environ.get("LOCAL_RANK", rank)))


def _train_all(rank: int, kind: str, training: Training, plans: dict[str, Any]) -> list[Outcome]:
    device = _local_device(kind, rank)
    found = []
    for name, plan in plans.items():
        print(f"rank {rank} begins: {name}", flush=True)  # The last one hangs, if any.
        found.append(train(training, plan, device))
    return [*found, train_alone(training)] if rank == 0 else found


def _train_sleeping(rank: int, kind: str, training: Training, plan: Any) -> tuple[Outcome, Outcome]:
    device, randomness = _local_device(kind, rank), random.Random(rank)

    def sleep(_: Action) -> None:
        if randomness.random() < 0.05:
            time.sleep(randomness.random() * 0.02)

    return train(training, plan, device), train(training, plan, device, entering=sleep)


def _train_capped(rank: int, kind: str, training: Training, plan: Any) -> tuple[Outcome, Outcome, int]:
    device = _local_device(kind, rank)
    free = train(training, plan, device)
    if kind != "cuda":
        return free, train(training, plan, device), 0
    total = torch.cuda.get_device_properties(device).total_memory

    def tighten(step: int, pipe: HeteroPipeline) -> AbstractContextManager[None]:
        if step >= 4 and step % 2 == 0:
            torch.cuda.synchronize()
            # What tensors need at most, and a little less room each time for what the allocator keeps.
            room = max(1.05, 1.4 - 0.05 * step) * torch.cuda.max_memory_allocated(device)
            torch.cuda.set_per_process_memory_fraction(min(1.0, room / total), device)
        return nullcontext()

    before = torch.cuda.memory_stats(device)["num_alloc_retries"]
    try:
        capped = train(training, plan, device, around_step=tighten)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return free, capped, torch.cuda.memory_stats(device)["num_alloc_retries"] - before
