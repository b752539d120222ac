"""How a rank leaves a pipeline: together with the others, or without them."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.assembly import Assembly
from zorselike.runtime.checkpoints import Checkpoints
from zorselike.runtime.comm.connections import Connections
from zorselike.runtime.result import SumOverRanks


def leave_together(assembly: Assembly, checkpoints: Checkpoints, totals: SumOverRanks, alarm: Alarm) -> None:
    """Gives back groups, buffers and threads; collective."""
    alarm.begin("close")
    checkpoints.close()
    totals.close()
    assembly.transport.close()
    assembly.updates.close()
    assembly.ties.close()
    if assembly.device.type == "cuda":
        torch.cuda.synchronize(assembly.device)  # The last copies to the host may be on their way.
    assembly.resources.memory.pool.close()
    # Nobody leaves before everybody has all that was sent; only then is leaving no failure.
    dist.barrier(group=assembly.control)
    alarm.close()
    assembly.groups.close()


def leave_alone(
    assembly: Assembly,
    checkpoints: Checkpoints,
    totals: SumOverRanks,
    alarm: Alarm,
    connections: Connections,
    *,
    beside: Callable[[], object] | None = None,
) -> None:
    """Gives the same back though others may be gone: first ends all connections, so that no thread of this
    process waits for them any more. `beside`: ends what else waits for others, or for a GPU that does, and
    reads this memory.

    With NCCL, not seen on a GPU yet: kernels that wait for a lost rank end with the abort of their groups,
    and only then does the device do anything else; what does not end in time is left to its fate, and its
    host buffers with it.
    """
    alarm.abandon()
    connections.shut()
    connections.end()
    has_ended = assembly.groups.abandon()
    checkpoints.abandon()
    if beside is not None:
        beside()
    totals.abandon()
    assembly.transport.abandon()
    assembly.updates.abandon()
    assembly.ties.abandon()
    if has_ended:
        if assembly.device.type == "cuda":
            torch.cuda.synchronize(assembly.device)
        assembly.resources.memory.pool.close()


def forget(error: BaseException) -> None:
    """Frees what the frames hold in which an error and its causes arose: tensors, and works that keep groups
    alive."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
