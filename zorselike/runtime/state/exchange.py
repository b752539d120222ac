"""Boxes on their way between ranks: the one engine that moves state."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zorselike.plan.holdings import Box, Copy
from zorselike.runtime.comm.ranks import ProcessGroup, Ranks

_BYTES_ON_THE_WAY = 2**28


class Channel(Protocol):
    """How tensors on the CPU get from one rank to another; those between two arrive in order."""

    rank: int
    """This process, as copies name it."""

    def send(self, content: Tensor, target: int) -> Callable[[], object]:
        """Starts sending; gives what waits until the memory may be reused."""
        ...

    def receive(self, buffer: Tensor, source: int) -> None:
        """Waits until it is there."""
        ...


class GroupChannel:
    """Ranks of a plan, over a Gloo group of all of them."""

    def __init__(self, ranks: Ranks, group: ProcessGroup) -> None:
        self.rank = ranks.rank
        self._ranks, self._group = ranks, group

    def send(self, content: Tensor, target: int) -> Callable[[], object]:
        work = dist.isend(content, self._ranks.process_of[target], group=self._group)
        assert work is not None
        return work.wait

    def receive(self, buffer: Tensor, source: int) -> None:
        dist.recv(buffer, self._ranks.process_of[source], group=self._group)


def exchange(
    due: Iterable[Copy],
    channel: Channel,
    *,
    read: Callable[[Box], Tensor],
    write: Callable[[Box, Tensor], None],
    dtype_of: Callable[[Box], torch.dtype],
) -> None:
    """Sends what `read` gives, on the CPU, to whom `due` says, and hands to `write` what comes; collective.

    All ranks go through the same list in the same order, so that the earliest copy not done is one that
    neither end keeps waiting.
    """
    leaving: deque[tuple[Callable[[], object], Tensor]] = deque()
    num_bytes = 0
    for source, target, box in due:
        if channel.rank not in (source, target):
            continue
        if source == target:
            write(box, read(box))
        elif source == channel.rank:
            content = read(box).contiguous()
            leaving.append((channel.send(content, target), content))
            num_bytes += content.nbytes
            while num_bytes > _BYTES_ON_THE_WAY:
                wait, content = leaving.popleft()
                wait()
                num_bytes -= content.nbytes
        else:
            buffer = torch.empty(box.shape, dtype=dtype_of(box), device="cpu")
            channel.receive(buffer, source)
            write(box, buffer)
    for wait, _ in leaving:
        wait()


def collect(
    due: Iterable[Copy],
    wanted: Iterable[Box],
    channel: Channel,
    *,
    read: Callable[[Box], Tensor],
    dtype_of: Callable[[Box], torch.dtype],
) -> dict[Box, Tensor]:
    """`exchange`, with what comes put together to the boxes that this rank wants; collective."""
    found = {box: torch.empty(box.shape, dtype=dtype_of(box), device="cpu") for box in wanted}
    of_tensor = defaultdict(list)
    for box in found:
        of_tensor[box.name, box.kind].append(box)

    def write(part: Box, values: Tensor) -> None:
        for box in of_tensor[part.name, part.kind]:
            if box.intersect(part) == part:
                part_of(part, box, found[box]).copy_(values)

    exchange(due, channel, read=read, write=write, dtype_of=dtype_of)
    return found


def part_of(box: Box, within: Box, values: Tensor) -> Tensor:
    """The part `box` of the values of a box that it lies in: a view."""
    for axis, (start, stop, first) in enumerate(zip(box.starts, box.stops, within.starts, strict=True)):
        values = values.narrow(axis, start - first, stop - start)
    return values


def find_uncovered(due: Iterable[Copy], wanted: Sequence[Box], rank: int) -> list[Box]:
    """Boxes that `rank` wants, and of which the copies to it do not hold every element."""
    held: dict[tuple[str, str], list[Box]] = defaultdict(list)
    for copy in due:
        if copy.target == rank:
            held[copy.box.name, copy.box.kind].append(copy.box)
    return [
        box
        for box in wanted
        if sum(part.num_elements for part in held[box.name, box.kind] if box.intersect(part) == part)
        < box.num_elements
    ]
