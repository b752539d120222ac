"""What a step came to: the same numbers on every rank, read when somebody asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from torch import Tensor

from zorselike.runtime.comm.device_thread import DeviceThread
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.memory.pinned import copy_to_host

Sums = tuple[float, float, float]
"""Loss sum, number of targets, squared gradient norm, each over all ranks."""


@dataclass(frozen=True, repr=False)
class StepResult:
    """Loss per target, number of targets and gradient norm of one step over the global batch.

    The sum over ranks runs beside the next step; reading a number waits for it, so nothing
    forces a world-wide wait on who does not ask.
    """

    _sums: Callable[[], Sums]
    _scaled: bool = False

    @property
    def loss(self) -> float:
        """Mean loss over the valid targets of the global batch (nan if there are none)."""
        loss_sum, num_targets, _ = self._sums()
        return loss_sum / num_targets if num_targets else math.nan

    @property
    def num_targets(self) -> int | float:
        """What `count_fn` counts, over the global batch."""
        num_targets = self._sums()[1]
        return int(num_targets) if num_targets.is_integer() else num_targets

    @property
    def grad_norm(self) -> float:
        """Norm of the whole gradient, before clipping; 0 after `evaluate`."""
        return math.sqrt(self._sums()[2])

    @property
    def is_skipped(self) -> bool:
        """Whether nothing was updated, because a gradient overflowed in fp16 (the loss scale halves)."""
        return self._scaled and not math.isfinite(self._sums()[2])

    def read_sums(self) -> Sums:
        """All three, as they are; waits for them."""
        return self._sums()

    @property
    def is_scaled(self) -> bool:
        """Whether the loss was, in fp16."""
        return self._scaled

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss}, num_targets={self.num_targets}, grad_norm={self.grad_norm})"


class SumOverRanks:
    """Sums three numbers over all ranks, one step after the other, off the critical path."""

    def __init__(self, group: ProcessGroup, memory: Memory) -> None:
        self._group = group
        self._streams = memory.streams
        # A number on a GPU is ready only after the work queued before it; a thread waits for it.
        self._thread = DeviceThread("result", memory.device) if memory.streams.is_concurrent else None
        self._last: Callable[[], Sums] | None = None

    def start(self, values: Tensor, *, scaled: bool = False) -> StepResult:
        """`values`: float64 `[3]` of this rank, see `Sums`; `scaled`: whether the loss was."""
        if self._thread is None:
            work = dist.all_reduce(values, group=self._group, async_op=True)
            self._last = cache(lambda: (work.wait(), _read(values))[1])  # A Work may be waited for once only.
        else:
            host, copied = copy_to_host(values, self._streams.compute)

            def reduce() -> Sums:
                copied.synchronize()
                dist.all_reduce(host, group=self._group)
                return _read(host)

            self._last = self._thread.submit(reduce).result
        return StepResult(self._last, scaled)

    def close(self) -> None:
        """Waits for the last sum: a rank that left earlier would break it for the others."""
        if self._last is not None:
            self._last()
            self._last = None
        if self._thread is not None:
            self._thread.close()

    def abandon(self) -> None:
        """Ends without the last sum."""
        self._last = None
        if self._thread is not None:
            self._thread.abandon()


def _read(values: Tensor) -> Sums:
    loss_sum, num_targets, squares = values.tolist()
    return loss_sum, num_targets, squares
