"""How much slower computation is while a collective of its group runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from zorselike.profiler.machine.group_clock import GroupClock
from zorselike.runtime._compat import all_gather_whole
from zorselike.runtime.comm.ranks import ProcessGroup

NUM_GATHERS = 8
"""In a row, as of the units of a ministage."""
MOST = 100.0
"""A computation that stands still."""
NUM_TRIALS = 3
"""The middle one counts: something else on the machine made one of them say that computation stood still."""
REPEATS = 4
"""In each."""
_WIDTHS = {"cpu": 96, "cuda": 2048}
"""Of the matrices that are multiplied: quick, and all of the device."""


def measure_slowdown(group: ProcessGroup, device: torch.device, *, num_bytes: int, repeats: int) -> float:
    """The factor, 1 or more; collective over the group, of at least two ranks.

    Some all-gathers of so many bytes begin at once; each is waited for, and a computation of about its
    length follows. Alone both take what they take; together they take as long as if computation went on
    this many times slower while the gathers ran.
    """
    bench = _Bench(group, device, num_bytes)
    bench.fit(bench.time(bench.gather, repeats) / NUM_GATHERS)
    works = (bench.gather, bench.compute, bench.gather_and_compute)
    trials = ([bench.time(work, repeats) for work in works] for _ in range(NUM_TRIALS))
    return median(find_slowdown(*seconds) for seconds in trials)


def find_slowdown(gathers_s: float, computing_s: float, both_s: float) -> float:
    """From the seconds of all gathers and of all computations, each alone, and of both together.

    Computation begins after the first gather, so it runs beside all but that one.
    """
    beside_s = gathers_s * (NUM_GATHERS - 1) / NUM_GATHERS
    done_s = gathers_s + computing_s - both_s
    """Of the computation, what was done beside gathers."""
    if done_s <= beside_s / MOST:
        return MOST
    return max(1.0, beside_s / done_s)


class _Bench:
    """Gathers and computations of one rank."""

    def __init__(self, group: ProcessGroup, device: torch.device, num_bytes: int) -> None:
        self._group, self._device = group, device
        self._clock = GroupClock(group, device)
        size = dist.get_world_size(group)
        num_own = max(1, num_bytes // size // torch.float32.itemsize)
        self._parts = [torch.zeros(num_own, device=device) for _ in range(NUM_GATHERS)]
        self._wholes = [torch.zeros(num_own * size, device=device) for _ in range(NUM_GATHERS)]
        width = _WIDTHS[device.type]
        self._factors = torch.ones(2, width, width, device=device)
        self._num_products = 1

    def fit(self, seconds: float) -> None:
        """Makes one computation about so long; the same on all ranks."""
        self._multiply()
        one_s = self._clock.time(self._multiply, repeats=20)
        number = torch.tensor([seconds / one_s], device=self._device)
        dist.all_reduce(number, group=self._group)
        self._num_products = max(1, round(float(number) / dist.get_world_size(self._group)))

    def time(self, work: Callable[[], None], repeats: int) -> float:
        """Mean seconds, after all ranks came together; that of the slowest rank."""
        seconds = self._clock.time_together(work, repeats=REPEATS * repeats)
        slowest = torch.tensor([seconds], device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self._group)
        return float(slowest)

    def gather(self) -> None:
        for work in self._start():
            work.wait()

    def compute(self) -> None:
        for _ in range(NUM_GATHERS):
            self._compute_once()

    def gather_and_compute(self) -> None:
        for work in self._start():
            work.wait()
            self._compute_once()

    def _start(self) -> list[dist.Work]:
        works = []
        for whole, part in zip(self._wholes, self._parts, strict=True):
            work = all_gather_whole(whole, part, self._group, async_op=True)
            assert work is not None
            works.append(work)
        return works

    def _compute_once(self) -> None:
        for _ in range(self._num_products):
            self._multiply()

    def _multiply(self) -> None:
        torch.mm(self._factors[0], self._factors[1])
