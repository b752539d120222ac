"""The processes of a job: who this one is, and what all of them agree on."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from zorselike.errors import ClusterError, ConfigError, PlanError
from zorselike.plan.plan import Plan
from zorselike.runtime.model.tracing import first_line
from zorselike.runtime.processes.own_device import find_own_device
from zorselike.train.config.config import USER_ERRORS, Config
from zorselike.train.report.colors import PlainFormatter

logger = logging.getLogger("zorselike")

PATIENCE = timedelta(days=1)
"""Of the group for agreements: tokenizing may take one node hours longer than another, and a
rank that dies or falls silent ends the job by other means."""

_ALONE = "tcp://127.0.0.1:0"

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the others; ranks here are the launcher's, not the plan's."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup
    """A Gloo group of all processes, for agreements between and beside steps."""
    timeout: timedelta
    """Of groups: how long processes wait for each other at the start."""

    def agree(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control, device=torch.device("cpu"))
        return box[0]

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, on every rank; a mistake of the user's there is raised on all.

        Raises:
            ClusterError: On the others, when rank 0 fails in another way.
        """
        value: T | None = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                value = work()
            except Exception as error:
                failure = error
        is_mistake = isinstance(failure, USER_ERRORS)
        told = failure if is_mistake or failure is None else ClusterError(f"rank 0: {first_line(failure)}")
        found, mistake = self.agree((value, told))
        if failure is not None:
            raise failure
        if mistake is not None:
            raise mistake
        return cast(T, found)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, on every rank."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def agree_on_data(self, read: Callable[[], T], *, describe: Callable[[T], str]) -> T:
        """What `read` gives here, if every rank can read it and `describe` is the same everywhere.

        Raises:
            ConfigError: On every rank, when one of them raises it.
            ClusterError: On every rank, when they do not hold the same.
        """
        found: T | None = None
        try:
            found = read()
            own = ("", describe(found))
        except ConfigError as error:
            own = (str(error), "")
        everyone = self.gather(own)
        for rank, (error_text, _) in enumerate(everyone):
            if error_text:
                raise ConfigError(error_text if own[0] == error_text else f"on process {rank}: {error_text}")
        descriptions = [description for _, description in everyone]
        usual = Counter(descriptions).most_common(1)[0][0]
        for rank, description in enumerate(descriptions):
            if description != usual:
                raise ClusterError(
                    f"process {rank} reads other data than the others ({description}, not {usual}): give "
                    "every node the same files (for the standard library: the same Python), or one shared "
                    "dataset_path"
                )
        assert found is not None
        return found


@contextmanager
def join_world(config: Config, plan: Plan | None) -> Iterator[World]:
    """Joins the processes that torchrun (or Slurm with its variables) started; one process alone
    needs no launcher. Without a plan any number of them will do.

    Raises:
        PlanError: The number of processes is not the plan's.
        ConfigError: `[hetero] device` is not here.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    if plan is not None and size != plan.num_ranks:
        raise PlanError(
            f"the plan {config.hetero.plan} is for {plan.num_ranks} ranks, but {size} "
            f"{'process runs' if size == 1 else 'processes run'}: start {plan.num_ranks}, on one machine by "
            f"torchrun --nproc-per-node {plan.num_ranks} -m zorselike.train ..."
        )
    device = find_own_device(
        config.hetero.device,
        without_gpu='[hetero] device = "cuda", but torch finds no GPU here; set it to "cpu"',
    )
    timeout = timedelta(seconds=config.comm.init_timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(choose_backend(device), timeout=timeout)
    else:
        dist.init_process_group(
            choose_backend(device), timeout=timeout, init_method=_ALONE, rank=0, world_size=1
        )
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(control, dist.ProcessGroup)
    yield World(rank=dist.get_rank(), size=size, device=device, control=control, timeout=timeout)
    # Only after a good end: after a failure, others may be waiting for what never comes.
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_backend(device: torch.device) -> str:
    """Of the default group."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def set_up_logging(rank: int) -> None:
    """Rank 0 tells everything, on standard output; the others only what is wrong."""
    handler = logging.StreamHandler(sys.stdout)
    style = PlainFormatter if not sys.stdout.isatty() else logging.Formatter
    who = "" if rank == 0 else f"rank {rank} - "
    handler.setFormatter(style(f"[zorselike] %(asctime)s - {who}%(levelname)s - %(message)s"))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
