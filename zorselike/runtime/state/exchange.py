"""Boxes on their way between ranks: the one engine that moves state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from zorselike.plan.holdings import Box, Copy
from zorselike.runtime.comm.ranks import ProcessGroup, Ranks

_BYTES_ON_THE_WAY = 2**28


def exchange(
    due: Iterable[Copy],
    ranks: Ranks,
    group: ProcessGroup,
    *,
    read: Callable[[Box], Tensor],
    write: Callable[[Box, Tensor], None],
    dtype_of: Callable[[Box], torch.dtype],
) -> None:
    """Sends what `read` gives, on the CPU, to whom `due` says, and hands to `write` what comes; collective.

    All ranks go through the same list in the same order, so that the earliest copy not done is one that
    neither end keeps waiting. `group` is a Gloo group of all ranks.
    """
    leaving: deque[tuple[dist.Work, Tensor]] = deque()
    num_bytes = 0
    for source, target, box in due:
        if ranks.rank not in (source, target):
            continue
        if source == target:
            write(box, read(box))
        elif source == ranks.rank:
            content = read(box).contiguous()
            work = dist.isend(content, ranks.process_of[target], group=group)
            assert work is not None
            leaving.append((work, content))
            num_bytes += content.nbytes
            while num_bytes > _BYTES_ON_THE_WAY:
                work, content = leaving.popleft()
                work.wait()
                num_bytes -= content.nbytes
        else:
            buffer = torch.empty(box.shape, dtype=dtype_of(box))
            dist.recv(buffer, ranks.process_of[source], group=group)
            write(box, buffer)
    for work, _ in leaving:
        work.wait()


def part_of(box: Box, within: Box, values: Tensor) -> Tensor:
    """The part `box` of the values of a box that it lies in: a view."""
    for axis, (start, stop, first) in enumerate(zip(box.starts, box.stops, within.starts, strict=True)):
        values = values.narrow(axis, start - first, stop - start)
    return values
