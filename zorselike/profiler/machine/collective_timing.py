"""Seconds of all-gathers, reduce-scatters and all-reduces of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import torch
import torch.distributed as dist

from zorselike.cost.profile import Collective, CollectiveTimes, Source
from zorselike.profiler.clock import Clock, make_rising, trimmed_mean
from zorselike.profiler.machine.compute_burst import ComputeBurst
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
        self._group = group
        self._device = device
        self._clock = Clock(device)
        self._burst = ComputeBurst(device)
        self._num_ranks = dist.get_world_size(group)

    def connect(self) -> None:
        """Runs each once, so that what the library allocates is there."""
        for op in get_args(Collective):
            self.time(op, 1, torch.float32)

    def time(self, op: Collective, num_elements: int, dtype: torch.dtype, *, repeats: int = 1) -> float:
        """Mean seconds of one collective over a buffer of so many elements, whole; it is padded so that
        it divides by the ranks. The first one, in which the group may still connect, is not counted. Small
        ones run more often: some wait long for a thread to wake up, and a step has many."""
        part = -(-num_elements // self._num_ranks)
        whole = torch.zeros(part * self._num_ranks, dtype=dtype, device=self._device)
        own = torch.zeros(part, dtype=dtype, device=self._device)
        run = self._pick(op, whole, own)
        run()
        seconds = []
        for _ in range(repeats * (MORE_OF_SMALL if num_elements * dtype.itemsize <= SMALL else 1)):
            # All ranks begin together, so that nobody's time holds another's delay.
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
            self._burst()
            self._clock.wait()
            begin = self._clock.mark()
            run()
            seconds.append(self._clock.seconds(begin, self._clock.mark()))
        return trimmed_mean(seconds)

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
