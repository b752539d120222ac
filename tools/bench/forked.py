"""Runs a function on forked ranks with Gloo, and times steps on them.

The parent imports torch and never computes: a child forked after a multithreaded backward
hangs in its own. Forked ranks start in 0.1 s and share the parent's memory.
"""

from __future__ import annotations

import os
import pickle
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..report import num_cores
from .link_sleep import LinkSleeper
from .sleeping import Device

_T = TypeVar("_T")


class RankFailedError(RuntimeError):
    """A rank raised or died."""


def run_forked(
    fn: Callable[..., _T],
    world_size: int,
    *args: Any,
    timeout_s: float = 600.0,
    enter: Callable[[int], None] | None = None,
) -> list[_T]:
    """`fn(rank, *args)` on every rank; the ranks' values by rank. `enter(rank)` comes first on each,
    before there are threads or connections."""
    # Values come back through memory that each child shares with this process alone, not files.
    values = [os.memfd_create(f"value{rank}") for rank in range(world_size)]
    with tempfile.TemporaryDirectory() as folder:
        pids = {}
        for rank in range(world_size):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _live(fn, rank, world_size, args, Path(folder), values[rank], enter)
            pids[pid] = rank
        try:
            _await_all(dict(pids), timeout_s, values)
            return [pickle.loads(os.pread(value, os.fstat(value).st_size, 0)) for value in values]
        finally:
            for pid in pids:
                _end(pid)
            for value in values:
                os.close(value)


def _live(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    folder: Path,
    result: int,
    enter: Callable[[int], None] | None,
) -> None:
    """A rank's whole life; does not return."""
    code = 1
    try:
        if enter is not None:
            enter(rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        torch.manual_seed(0)
        store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        value = fn(rank, *args)
        with os.fdopen(result, "wb", closefd=False) as memory:
            pickle.dump(value, memory)
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _await_all(alive: dict[int, int], timeout_s: float, values: list[int]) -> None:
    deadline = time.monotonic() + timeout_s
    while alive:
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == 0:
                continue
            rank = alive.pop(pid)
            if status != 0 and not os.fstat(values[rank]).st_size:
                raise RankFailedError(f"rank {rank} ended with code {os.waitstatus_to_exitcode(status)}")
        if time.monotonic() > deadline:
            raise RankFailedError(f"ranks {sorted(alive.values())} did not end in {timeout_s} s")
        time.sleep(0.02)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


@dataclass(frozen=True)
class RankTimes:
    """One rank's steps, in monotonic seconds, and what they cost it."""

    begin_s: tuple[float, ...]
    end_s: tuple[float, ...]
    cpu_s: float


@dataclass(frozen=True)
class Timing:
    """Steps of all ranks together."""

    step_s: tuple[float, ...]
    cpu_share: float
    """Processor time of all ranks over the time of all cores."""
    cpu_s: float
    """Processor seconds of all ranks a step."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @classmethod
    def of(cls, ranks: list[RankTimes]) -> Timing:
        steps = tuple(
            max(ends) - min(begins)
            for begins, ends in zip(
                zip(*(r.begin_s for r in ranks), strict=True),
                zip(*(r.end_s for r in ranks), strict=True),
                strict=True,
            )
        )
        cpu_s = sum(r.cpu_s for r in ranks)
        return cls(steps, cpu_s / (num_cores() * sum(steps)), cpu_s / len(steps))


def time_steps(
    step: Callable[[], None], device: Device, num_steps: int, links: LinkSleeper | None = None
) -> RankTimes:
    """Runs one step that sets everything up, unslowed, and then `num_steps` slowed ones."""
    step()
    dist.barrier()
    device.is_awake = False
    begins, ends = [], []
    cpu_s = 0.0
    for _ in range(num_steps):
        dist.barrier()
        if links is not None:
            links.is_on = True
        cpu_begin_s = time.process_time()
        begins.append(time.monotonic())
        step()
        ends.append(time.monotonic())
        cpu_s += time.process_time() - cpu_begin_s
        if links is not None:
            links.is_on = False
    return RankTimes(tuple(begins), tuple(ends), cpu_s)
