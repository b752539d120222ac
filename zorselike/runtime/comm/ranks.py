"""Ranks of the plan, and the processes that play them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zorselike.runtime._compat import (
    abort_groups,
    has_nccl,
    let_wait,
    nccl_options,
    one_collective_at_a_time,
    release_groups,
    unbound_default_group,
    uncounted_groups,
)

ProcessGroup = dist.ProcessGroup

MOST_PAIR_BLOCKS = 4
_ABORT_S = 10.0
_PATIENCE = timedelta(days=1)
"""A step may take hours, and receives are posted early in it; the alarm hears of ranks that are gone."""


@dataclass(frozen=True)
class Ranks:
    """Who this process is in the plan, and which process plays each rank of the plan."""

    rank: int
    process_of: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.process_of)

    def processes(self, ranks: Sequence[int]) -> list[int]:
        return [self.process_of[rank] for rank in ranks]


@dataclass
class Groups:
    """Every process group of a pipeline, created in one global order and given back together.

    The communicating parts never share one: collectives in opposite order within a group hang.
    """

    ranks: Ranks
    is_aborted: bool = False
    """Whether streams went on past what waits for other ranks: what they compute after that is worthless."""
    _made: list[ProcessGroup] = field(default_factory=list)
    _meshes: list[DeviceMesh] = field(default_factory=list)
    _device: int = 0
    """Of NCCL's; who aborts may be a thread that has none."""
    _aborting: Lock = field(default_factory=Lock)
    _has_ended: bool | None = None

    def make_pair(
        self, ends: tuple[int, int], *, max_blocks: int = MOST_PAIR_BLOCKS, what: str = ""
    ) -> ProcessGroup | None:
        """An NCCL group for transfers from one rank to another. A posted receive occupies multiprocessors
        until its rows come, so it gets few of them: each moves more a second than activations need."""
        return self.make(ends, "nccl", options=nccl_options(max_blocks=max_blocks), what=what)

    def make(
        self, members: Sequence[int], backend: str, *, options: Any = None, what: str = ""
    ) -> ProcessGroup | None:
        """A group over ranks of the plan; every process calls, members get it. `what`: what it is called
        where somebody looks for what hangs."""
        processes = sorted(self.ranks.processes(members))
        with unbound_default_group(), one_collective_at_a_time():
            group = dist.new_group(processes, backend=backend, pg_options=options, group_desc=what or None)
        return None if self.ranks.rank not in members else self._keep(group)

    def make_own(self, backend: str) -> ProcessGroup:
        """A group of this process alone, known to nobody else."""
        process = self.ranks.process_of[self.ranks.rank]
        with unbound_default_group(), one_collective_at_a_time(), uncounted_groups():
            group = dist.new_group([process], backend=backend, use_local_synchronization=True)
        return self._keep(group)

    def _keep(self, group: Any) -> ProcessGroup:
        assert isinstance(group, ProcessGroup)
        let_wait(group, _PATIENCE)
        if has_nccl(group):
            self._device = torch.cuda.current_device()
        self._made.append(group)
        return group

    def make_mesh(self, groups: list[ProcessGroup], device_type: str, ranks: list[list[int]]) -> DeviceMesh:
        """A mesh over groups of this process, one a dimension; `ranks` is its layout."""
        if len(groups) == 1:
            mesh = DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=("dp",))
        else:
            names = ("replicate", "shard")
            mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
        self._meshes.append(mesh)
        return mesh

    @property
    def are_there(self) -> bool:
        """Whether the caller has not destroyed them, with the default group and all others."""
        try:
            for group in self._made[:1]:  # All went, or none.
                dist.get_rank(group)
        except ValueError:
            return False
        return True

    def close(self) -> None:
        while self._made:
            with suppress(ValueError):  # Destroyed already, with the default group.
                dist.destroy_process_group(self._made.pop())
        while self._meshes:
            release_groups(self._meshes.pop())

    def abort(self) -> bool:
        """Ends what NCCL runs, which may wait for ranks that are gone, and with it threads that wait for the
        device; whether that ended in time. From any thread, once; `abandon` comes next."""
        with self._aborting:
            if self._has_ended is None:
                doomed = list(filter(has_nccl, self._made))
                self.is_aborted = bool(doomed)
                self._has_ended = abort_groups(doomed, self._device, deadline_s=_ABORT_S)
            return self._has_ended

    def abandon(self) -> bool:
        """`close` without the other ranks, some of which may be gone: ends what the groups still run. Whether
        that ended in time; else the process had better end, too."""
        has_ended = self.abort()
        if not has_ended:
            self._made.clear()
        self.close()
        return has_ended
