"""The processes of a job: how they find each other, and how they agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

from zorselike.errors import USER_ERRORS, ClusterError
from zorselike.runtime.comm.connections import allow_many_files
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.processes.arrival import Arrival
from zorselike.runtime.processes.identity import find_identity
from zorselike.runtime.processes.launcher_store import open_store
from zorselike.runtime.processes.world import ProcessInfo, describe_process, device_type, gather_world
from zorselike.text.wording import first_line

if TYPE_CHECKING:
    from zorselike.runtime._compat import Store
    from zorselike.runtime.alarm.alarm import Alarm

T = TypeVar("T")
OnArrival = Callable[["Store"], object]

_PATIENCE = timedelta(days=1)
"""How long agreements wait: one rank may tokenize, or measure, for hours longer than another, and one that
dies or falls silent ends the job by other means."""


class Peers:
    """This process among others that do the same, and how they agree."""

    rank: int
    control: ProcessGroup
    """All of them over Gloo, used between steps only."""

    @property
    def size(self) -> int:
        return dist.get_world_size(self.control)

    @property
    def node(self) -> str:
        return find_identity().node

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank; collective."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, value: T) -> T:
        """The value of rank 0, on every rank; collective."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control, device=torch.device("cpu"))
        return box[0]

    def gather_or_raise(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on every rank. A user's error on one is raised on all, any other as a
        `ClusterError` that names the rank; collective."""
        value, failure = _try(work)
        said = self.gather((value, self._tell(failure)))
        for _, error in said:
            if error is not None:
                raise error from failure
        return [cast(T, value) for value, _ in said]

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, on every rank; errors as in `gather_or_raise`, but that rank 0 raises
        its own as it is. Collective."""
        value, failure = _try(work) if self.rank == 0 else (None, None)
        found, error = self.share((value, self._tell(failure)))
        if failure is not None:
            raise failure
        if error is not None:
            raise error
        return cast(T, found)

    def _tell(self, failure: Exception | None) -> Exception | None:
        """A failure as the other ranks raise it; what a user can mend says itself where it is from."""
        if failure is None or isinstance(failure, USER_ERRORS):
            return failure
        return ClusterError(f"rank {self.rank} (node {self.node}) failed: {first_line(failure)}")


@dataclass(frozen=True)
class Processes(Peers):
    """This process among the others; ranks are the launcher's, not a plan's."""

    infos: tuple[ProcessInfo, ...]
    """What each process says of itself, by rank."""
    rank: int
    device: torch.device
    everyone: ProcessGroup
    """All ranks, on the devices' own network."""
    alone: ProcessGroup
    """This rank alone, on the same."""
    control: ProcessGroup
    """All ranks over Gloo, for agreements between and beside steps."""
    timeout: timedelta
    """How long ranks wait for each other at the start."""
    alarm: Alarm | None = None
    """That ends all with one of them, to be abandoned once something else does."""

    @property
    def size(self) -> int:
        return len(self.infos)

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The device type of each rank; `ClusterError` where the catalogue has no name for one."""
        return tuple(map(device_type, self.infos))

    @property
    def type(self) -> str:
        """This rank's device type."""
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


def _try(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


@contextmanager
def join_processes(
    device: torch.device,
    *,
    timeout: timedelta,
    described: torch.device | None = None,
    on_arrival: OnArrival | None = None,
) -> Iterator[Processes]:
    """Joins the processes that a launcher started; one without a launcher stands alone.

    `device`: whose network carries `everyone`; `described`: the device that this process says it computes
    on, if it is another; `on_arrival`: see `connect`. Raises `ClusterError` where the processes do not find
    each other in time, or some are of an elastic job.
    """
    connect(device, timeout=timeout, on_arrival=on_arrival)
    processes = make_processes(device, timeout=timeout, described=described)
    has_ended_well = False
    try:
        yield processes
        has_ended_well = True
    finally:
        # After a failure, others may be waiting for what never comes. One process has no others, and may
        # be aborted at its exit by threads of groups that it left behind.
        if (has_ended_well or processes.size == 1) and dist.is_initialized():
            dist.destroy_process_group()


def make_processes(
    device: torch.device, *, timeout: timedelta, described: torch.device | None = None
) -> Processes:
    """The processes of the default group; collective."""
    rank, everyone = dist.get_rank(), dist.group.WORLD
    control = dist.new_group(backend="gloo", timeout=_PATIENCE)
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert everyone is not None and isinstance(control, ProcessGroup) and isinstance(alone, ProcessGroup)
    return Processes(
        infos=tuple(gather_world(describe_process(described or device, rank=rank))),
        rank=rank,
        device=device,
        everyone=everyone,
        alone=alone,
        control=control,
        timeout=timeout,
    )


def choose_backend(device: torch.device) -> str:
    """The default group's backend."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def connect(device: torch.device, *, timeout: timedelta, on_arrival: OnArrival | None = None) -> None:
    """Makes the default process group; raises `ClusterError` where ranks do not find each other in time, or
    some are of an elastic job. `on_arrival`: called with their store before, once all have come."""
    identity, backend = find_identity(), choose_backend(device)
    allow_many_files()
    try:
        store = open_store(identity, timeout)
        if identity.size > 1:
            arrival = Arrival(store, identity, timeout)
            arrival.arrive(is_elastic=False)
            store = arrival.store
            if on_arrival is not None:
                on_arrival(store)
        dist.init_process_group(
            backend, store=store, rank=identity.rank, world_size=identity.size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        if isinstance(error, USER_ERRORS):
            raise
        raise ClusterError(
            f"rank {identity.rank} on node {identity.node} could not join the others: {first_line(error)}; "
            "start all ranks by torchrun, and name the network interface by which nodes reach each other in "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (zorselike doctor lists them)"
        ) from error
