"""Seconds of all-gathers, reduce-scatters and all-reduces of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import torch
import torch.distributed as dist

from zorselike.cost.profile import Collective, CollectiveTimes, Source
from zorselike.profiler.clock import make_rising
from zorselike.profiler.machine.group_clock import GroupClock
from zorselike.runtime._compat import all_gather_whole, reduce_scatter_whole
from zorselike.runtime.comm.ranks import ProcessGroup

SIZES = tuple(2**exponent for exponent in range(12, 27, 2))
"""Bytes of the whole buffer: 4 KiB to 64 MiB. What is larger takes longer in proportion."""

SMALL = 2**20
"""Bytes up to which more are timed."""
MORE_OF_SMALL = 16


class Collectives:
    """A group's collectives, timed on this rank; every method is collective."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._clock = GroupClock(group, device)
        self._num_ranks = dist.get_world_size(group)

    def connect(self) -> None:
        """Runs each once, so that what the library allocates is there."""
        for op in get_args(Collective):
            self.time(op, 1, torch.float32)

    def time(self, op: Collective, num_elements: int, dtype: torch.dtype, *, repeats: int = 1) -> float:
        """Mean seconds of one collective over a buffer of so many elements, whole; it is padded so that
        it divides by the ranks. Small ones run more often: some wait long for a thread to wake up, and a step
        has many."""
        part = -(-num_elements // self._num_ranks)
        whole = torch.zeros(part * self._num_ranks, dtype=dtype, device=self._device)
        own = torch.zeros(part, dtype=dtype, device=self._device)
        is_small = num_elements * dtype.itemsize <= SMALL
        repeats *= MORE_OF_SMALL if is_small else 1
        return self._clock.time_together(self._pick(op, whole, own), repeats=repeats)

    def _pick(self, op: Collective, whole: torch.Tensor, own: torch.Tensor) -> Callable[[], object]:
        match op:
            case "all_gather":
                return lambda: all_gather_whole(whole, own, self._group)
            case "reduce_scatter":
                return lambda: reduce_scatter_whole(own, whole, self._group)
            case "all_reduce":
                return lambda: dist.all_reduce(whole, group=self._group)


def measure_collectives(
    group: ProcessGroup,
    device: torch.device,
    *,
    devices: Sequence[str],
    num_nodes: int,
    repeats: int,
    source: Source,
    sizes: Sequence[int] = SIZES,
) -> tuple[CollectiveTimes, ...]:
    """The times of every collective of a group, against bytes; collective over its ranks."""
    collectives = Collectives(group, device)
    return tuple(
        CollectiveTimes(
            op=op,
            devices=tuple(sorted(devices)),
            num_nodes=num_nodes,
            num_bytes=tuple(sizes),
            seconds=make_rising(
                [collectives.time(op, size // 4, torch.float32, repeats=repeats) for size in sizes]
            ),
            source=source,
        )
        for op in get_args(Collective)
    )
