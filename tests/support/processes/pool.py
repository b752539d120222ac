"""Ranks that stay for the next function: to copy what a fork touches is much of what a small one costs.

For functions that leave a process as they found it, but for what they import: a rank that was killed, that
exited, or whose patches or threads stay is for `run_ranks`. Collectives that stay patched are an error.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import ranks
import torch.distributed as dist
from ranks import Child, RankError

_LEAVING_S = 30


@dataclass(frozen=True)
class _Job:
    fn: Callable[..., Any]
    """Known by name: of a module that was there when the ranks were made."""
    world_size: int
    args: tuple[Any, ...]
    folder: Path


@dataclass(frozen=True)
class _Rank:
    pid: int
    jobs: Connection


class Pool:
    """The ranks of one process of the tests, forked once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranks: list[_Rank] = []

    def start(self) -> None:
        """Where they are not there, at first or after a failure."""
        ranks.warm_up()
        sys.stdout.flush()
        sys.stderr.flush()
        while len(self._ranks) < self._size:
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                for other in self._ranks:
                    other.jobs.close()
                ours.close()
                _live(len(self._ranks), theirs)
            theirs.close()
            self._ranks.append(_Rank(pid, ours))

    def run(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, **options: Any
    ) -> list[Any]:
        """As `run_ranks`, which does it where it is given options, more ranks than are here, or what cannot
        be sent to them. After a failure the ranks are others."""
        with tempfile.TemporaryDirectory(prefix="ranks") as name:
            folder = Path(name)
            job = _pack(_Job(fn, world_size, args, folder))
            if options or world_size > self._size or job is None:
                return ranks.run_ranks(fn, world_size, *args, timeout=timeout, **options)
            self.start()
            used = self._ranks[:world_size]
            children = [Child(number, rank.pid, folder) for number, rank in enumerate(used)]
            try:
                for rank in used:
                    rank.jobs.send_bytes(job)
                values = ranks.await_values(children, time.monotonic() + timeout, timeout)
                for rank in used:  # None leaves before all are done.
                    rank.jobs.send(None)
                for rank in used:
                    if not rank.jobs.poll(_LEAVING_S):
                        raise RankError(f"a rank of {fn.__name__} has not left its group in {_LEAVING_S} s")
                    if patched := rank.jobs.recv():
                        raise RankError(f"{fn.__name__} leaves torch.distributed patched: {patched}")
                return values
            except BaseException:
                self.close()
                raise
            finally:
                for child in children:
                    sys.stdout.write(child.read("stdout"))
                    sys.stderr.write(child.read("stderr"))

    def close(self) -> None:
        for number, rank in enumerate(self._ranks):
            Child(number, rank.pid, Path()).kill()
            rank.jobs.close()
            with contextlib.suppress(ChildProcessError):  # It had ended, and that was seen.
                os.waitpid(rank.pid, 0)
        self._ranks.clear()


def _pack(job: _Job) -> bytes | None:
    """None where it has something of its own process, such as a `lambda`."""
    try:
        return bytes(ForkingPickler.dumps(job))
    except (AttributeError, TypeError, pickle.PicklingError):
        return None


def _live(rank: int, jobs: Connection) -> None:
    """A rank's whole life; never returns."""
    try:
        ranks.begin_life()
        environment, distributed = dict(os.environ), dict(vars(dist))
        while True:
            job = jobs.recv()
            os.environ.update(ranks.environment(rank, job.world_size))
            ranks.redirect_output(rank, job.folder)
            ranks.call(job.fn, rank, job.world_size, job.args, job.folder, init=True)
            sys.stdout.flush()
            sys.stderr.flush()
            jobs.recv()
            dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(environment)
            gc.collect()
            jobs.send([name for name, known in distributed.items() if getattr(dist, name) is not known])
    finally:
        os._exit(1)
