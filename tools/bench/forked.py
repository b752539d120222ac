"""Runs a function on forked ranks with Gloo, and times steps on them.

The parent imports torch and never computes: a child forked after a multithreaded backward
hangs in its own. Forked ranks start in 0.1 s and share the parent's memory.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from zorselike.text.wording import first_line

from ..report import num_cores

if TYPE_CHECKING:
    from slow_links.transport import LinkSleeper

_T = TypeVar("_T")
EXIT_S = 10.0
"""How long ranks that have returned may take to leave."""


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
    context = multiprocessing.get_context("fork")
    ranks: dict[Connection, BaseProcess] = {}
    values: dict[int, _T] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                receiving, sending = context.Pipe(duplex=False)
                live = partial(_live, fn, rank, world_size, args, Path(folder), sending, enter)
                ranks[receiving] = context.Process(target=live, name=str(rank), daemon=True)
                ranks[receiving].start()
                sending.close()  # Before the next is forked, so that its end is seen.
            waiting, deadline = dict(ranks), time.monotonic() + timeout_s
            while waiting:
                ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = sorted(int(process.name) for process in waiting.values())
                    raise RankFailedError(f"ranks {late} did not end in {timeout_s} s")
                for each in ready:
                    assert isinstance(each, Connection)
                    process = waiting.pop(each)
                    try:
                        value = each.recv()
                    except EOFError:
                        process.join()
                        raise RankFailedError(
                            f"rank {process.name} ended with code {process.exitcode}"
                        ) from None
                    if isinstance(value, RankFailedError):
                        raise value
                    values[int(process.name)] = value
            for process in ranks.values():
                process.join(EXIT_S)  # All are past their values: they leave together.
            return [values[rank] for rank in range(world_size)]
        finally:
            for receiving, process in ranks.items():
                process.kill()
                process.join()
                receiving.close()


def _live(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    folder: Path,
    result: Connection,
    enter: Callable[[int], None] | None,
) -> None:
    """A rank's whole life."""
    if enter is not None:
        enter(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        value: Any = fn(rank, *args)
    except Exception as error:
        traceback.print_exc()
        value = RankFailedError(f"rank {rank}: {first_line(error)}")
    result.send_bytes(pickle.dumps(value))  # Tensors by value: they outlive this process.
    dist.barrier()  # One that leaves early would break the connections of the others.
    os._exit(0)


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


class Sleeper(Protocol):
    """What sleeps for the time that a device would compute, once everything is set up."""

    is_awake: bool


def time_steps(
    step: Callable[[], None], device: Sleeper, num_steps: int, links: LinkSleeper | None = None
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
