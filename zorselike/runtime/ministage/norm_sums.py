"""Squared norms summed over ranks: on the device where one communicator joins them, else on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from zorselike.runtime.comm.device_thread import DeviceThread
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.memory.pinned import copy_to_host
from zorselike.runtime.memory.streams import Stream


@dataclass(frozen=True)
class Total:
    """A sum, float64 `[]`."""

    read: Callable[[], Tensor]
    """Gives it; one on the host is waited for."""
    is_on_device: bool = False
    """Whether the stream has it, and the host does not know it."""


@dataclass(frozen=True)
class NormGroup:
    """Ranks whose squares are added up."""

    host: ProcessGroup
    """Gloo, for nothing else."""
    device: ProcessGroup | None
    """NCCL over the same ranks, if they have that."""


class NormSums:
    """Starts one sum after the other."""

    def __init__(self, memory: Memory, *, decides: bool) -> None:
        """`decides`: whether the host must know a sum, and not only the device."""
        self._streams = memory.streams
        self._decides = decides
        self._device = memory.device
        self._thread: DeviceThread | None = None

    def start(self, squares: Tensor, group: NormGroup, stream: Stream) -> Total:
        """The sum of `squares` over a group; both are `stream`'s. A thread waits for device and Gloo."""
        if self._streams.is_concurrent and not self._decides:
            if dist.get_world_size(group.host) == 1:
                return Total(lambda: squares, is_on_device=True)
            if group.device is not None:
                with stream.use():
                    total = squares.clone()
                    dist.all_reduce(total, group=group.device)
                return Total(lambda: total, is_on_device=True)
        with stream.use():
            host, copied = copy_to_host(squares, stream)

        def reduce() -> Tensor:
            copied.synchronize()
            dist.all_reduce(host, group=group.host)
            return host

        if not self._streams.is_concurrent:
            reduce()
            return Total(lambda: host)
        if self._thread is None:
            self._thread = DeviceThread("norm", self._device)
        return Total(self._thread.submit(reduce).result)

    def close(self) -> None:
        """Waits for the last one."""
        if self._thread is not None:
            self._thread.close()

    def abandon(self) -> None:
        """Ends without it."""
        if self._thread is not None:
            self._thread.abandon()
