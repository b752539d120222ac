"""The processes that measure together: one, or as many as torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from zorselike.cost.catalogue import match_device_name
from zorselike.errors import ClusterError, ConfigError, ProfileError
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.model.tracing import first_line
from zorselike.runtime.processes.own_device import find_own_device
from zorselike.runtime.processes.world import NODE_VARIABLE, ProcessInfo, describe_process, gather_world

T = TypeVar("T")

_PATIENCE = timedelta(days=1)
"""Of the group for agreements: one kind of card may measure for hours while others wait."""


class Agree(Protocol):
    """Brings the values of all ranks, by rank, to every rank."""

    def __call__(self, value: T, /) -> list[T]: ...


@dataclass(frozen=True)
class Processes:
    """This process among the others."""

    infos: tuple[ProcessInfo, ...]
    """Of all, by rank."""
    types: tuple[str, ...]
    """The device type of each."""
    rank: int
    device: torch.device
    everyone: ProcessGroup
    """All ranks, on the devices' own network."""
    alone: ProcessGroup
    control: ProcessGroup
    """All ranks, over Gloo."""

    @property
    def size(self) -> int:
        return len(self.infos)

    @property
    def own_type(self) -> str:
        return self.types[self.rank]

    @property
    def node(self) -> str:
        return self.infos[self.rank].node

    @property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each node, in the order of their first."""
        found: dict[str, list[int]] = {}
        for info in self.infos:
            found.setdefault(info.node, []).append(info.rank)
        return found

    def represents(self, *, of: Callable[[int], object]) -> bool:
        """Whether this rank is the first of those for which `of` gives what it gives for this one."""
        return next(rank for rank in range(self.size) if of(rank) == of(self.rank)) == self.rank

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank; collective."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, value: T) -> T:
        """The value of rank 0, on every rank; collective."""
        return self.gather(value)[0]

    def gather_or_raise(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on every rank; where it raises on one, all raise `ClusterError` naming it."""
        value: T | None = None
        failure: Exception | None = None
        text = ""
        try:
            value = work()
        except (
            ClusterError,
            ConfigError,
            ProfileError,
        ) as error:  # These say themselves where they are from.
            failure, text = error, str(error)
        except Exception as error:
            failure, text = error, f"rank {self.rank} (node {self.node}) failed: {first_line(error)}"
        said = self.gather((value, text))
        for _, other in said:
            if other:
                raise ClusterError(other) from failure
        return [value for value, _ in said if value is not None]


@contextmanager
def join_processes(
    device: torch.device,
    *,
    timeout_s: float,
    described: torch.device | None = None,
    name_device: Callable[[ProcessInfo], str] | None = None,
) -> Iterator[Processes]:
    """Joins what torchrun started, or stands alone.

    Args:
        device: whose network carries what is measured.
        timeout_s: how long ranks wait for each other at the start.
        described: the device that this process says it computes on, if it is another.
        name_device: its type; the catalogue's name (`device_type`) unless given.

    Raises:
        ClusterError: They do not find each other, or a device has no name in the catalogue.
    """
    connect(device, timeout_s=timeout_s)
    rank, size = dist.get_rank(), dist.get_world_size()
    infos = tuple(gather_world(describe_process(described or device, rank=rank)))
    everyone, control = dist.group.WORLD, dist.new_group(backend="gloo", timeout=_PATIENCE)
    alone = [dist.new_group([other]) for other in range(size)][rank]  # Every rank makes every group.
    assert everyone is not None
    ended_well = False
    try:
        yield Processes(
            infos=infos,
            types=tuple(map(name_device or device_type, infos)),
            rank=rank,
            device=device,
            everyone=everyone,
            alone=alone,
            control=control,
        )
        ended_well = True
    finally:
        # After a failure, others may be waiting for what never comes. One process has no others, and may
        # be aborted at its exit by threads of groups that it left behind.
        if ended_well or size == 1:
            dist.destroy_process_group()


def connect(device: torch.device, *, timeout_s: float) -> None:
    """Makes the default process group.

    Raises:
        ClusterError: Ranks do not find each other in time.
        ConfigError: That time is none.
    """
    if not 0 < timeout_s <= _PATIENCE.total_seconds():
        raise ConfigError(
            f"--timeout is {timeout_s:g}; give seconds, above 0 and at most {_PATIENCE.total_seconds():.0f}"
        )
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    node = os.environ.get(NODE_VARIABLE) or os.uname().nodename
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise ClusterError(
            f"rank {os.environ['RANK']} on node {node} could not join the others: {first_line(error)}; start "
            "all ranks by torchrun, and name the network interface by which nodes reach each other in "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (zorselike doctor lists them)"
        ) from error


def find_device(wanted: str) -> torch.device:
    """The device of this process, made the current one; raises `ConfigError` where it is not."""
    return find_own_device(
        wanted, without_gpu="--device cuda: torch finds no GPU here; leave it out, or give --device cpu"
    )


def device_type(info: ProcessInfo) -> str:
    """The catalogue's name of what a process computes on; raises `ClusterError` if it has none."""
    name = "cpu" if info.device == "cpu" else info.device_name
    found = match_device_name(name, info.memory_bytes)
    if found is None:
        raise ClusterError(
            f"node {info.node}: the device catalogue has no '{name}' with "
            f"{info.memory_bytes / 2**30:.1f} GiB; measure on a card that it knows, or add it to "
            "zorselike/cost/catalogue.py"
        )
    return found
