"""Times what all ranks of a group begin together, after a burst of computation as between messages."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from zorselike.profiler.clock import Clock, trimmed_mean
from zorselike.runtime.comm.ranks import ProcessGroup

SECONDS = 1e-3
_WIDTH = 96


class ComputeBurst:
    """What a rank that computes by itself does between two measurements of wires: threads that carry messages
    wake up from it as in a step, and not as from the message before. A device's messages have its own
    engines; there it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._factors = torch.ones(2, _WIDTH, _WIDTH, device="cpu")

    def __call__(self, seconds: float = SECONDS) -> None:
        """Computes for so long."""
        if self._on_cpu:
            end_s = time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                torch.mm(self._factors[0], self._factors[1])


class GroupClock(Clock):
    """A clock of one rank of a group."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(device)
        self._group = group
        self._burst = ComputeBurst(device)

    def time_together(self, work: Callable[[], object], *, repeats: int) -> float:
        """Mean seconds of `work` on this rank; collective. All ranks begin together, so that nobody's time
        holds another's delay. The first run, in which the group may still connect, is not counted."""
        seconds = []
        for _ in range(1 + repeats):
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
            self._burst()
            self.wait()
            begin = self.mark()
            work()
            seconds.append(self.seconds(begin, self.mark()))
        return trimmed_mean(seconds[1:])
