"""One rank's device and host memory: what it holds by purpose, and the host buffers for what it offloads.

Torch's own pinned allocator rounds each buffer up to a power of two, which can double what a
rank takes; here one slab holds many buffers and is registered with the driver as it is.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from zorselike.errors import ConfigError
from zorselike.runtime.memory.host_room import find_host_room
from zorselike.runtime.memory.pinned import make_pinned, unpin, unpin_abandoned
from zorselike.runtime.memory.streams import Streams
from zorselike.text.wording import show_bytes

Place = Literal["device", "host"]

CHECKPOINT_COPIES = "copies for checkpoints"
"""What host buffers may be for beside the purposes of the memory model."""

_ALIGNMENT = 64
"""Bytes: where each buffer of a slab begins."""


class Ledger:
    """Bytes held on the device and on the host; the offload code enters what it allocates and frees."""

    def __init__(self) -> None:
        self._held: defaultdict[tuple[str, Place], int] = defaultdict(int)
        self._peaks: defaultdict[tuple[str, Place], int] = defaultdict(int)

    def hold(self, purpose: str, place: Place, num_bytes: int) -> None:
        """Enters an allocation."""
        key = (purpose, place)
        self._held[key] += num_bytes
        self._peaks[key] = max(self._peaks[key], self._held[key])

    def drop(self, purpose: str, place: Place, num_bytes: int) -> None:
        """Enters a free."""
        self._held[purpose, place] -= num_bytes
        assert self._held[purpose, place] >= 0, f"{purpose} on the {place} freed twice"

    def held(self, purpose: str, place: Place) -> int:
        return self._held[purpose, place]

    def peak(self, purpose: str, place: Place) -> int:
        return self._peaks[purpose, place]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device now, over all purposes."""
        return sum(count for (_, place), count in self._held.items() if place == "device")


class HostPool:
    """All host buffers of one rank. Those of one purpose and size are given out again and again."""

    def __init__(self, ledger: Ledger, *, pin: bool) -> None:
        self._ledger = ledger
        self._pin = pin
        self._free: defaultdict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self._slabs: list[Tensor] = []
        if pin:
            # The thread that collects garbage may have another device, or none.
            device = torch.cuda.current_device()
            weakref.finalize(self, unpin_abandoned, self._slabs, os.getpid(), device).atexit = False

    def reserve(self, purpose: str, sizes: Sequence[int]) -> None:
        """Makes room for buffers of these sizes (bytes) at once, beside what is free already.

        Raises `ConfigError`, with the numbers, if the host does not have that much.
        """
        missing = list(sizes)
        for size in {*sizes}:
            for _ in range(min(len(self._free[purpose, size]), sizes.count(size))):
                missing.remove(size)
        rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in missing]
        if not sum(rounded):
            return
        slab = self._allocate(purpose, sum(rounded))
        for size, start in zip(missing, accumulate(rounded, initial=0), strict=False):
            self._free[purpose, size].append(slab[start : start + size])

    def take(self, purpose: str, num_bytes: int) -> Tensor:
        """A buffer of bytes, `uint8 [num_bytes]`."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if not self._free[purpose, num_bytes]:
            self.reserve(purpose, [num_bytes])
        return self._free[purpose, num_bytes].pop()

    def give_back(self, purpose: str, buffer: Tensor) -> None:
        """Lets a buffer be taken again; the caller has ordered its last use before the next."""
        if buffer.numel():
            self._free[purpose, buffer.numel()].append(buffer)

    def close(self) -> None:
        """Gives everything back to the system, whoever still holds a buffer."""
        self._free.clear()
        if self._pin:
            unpin(self._slabs)
        while self._slabs:
            self._slabs.pop().untyped_storage().resize_(0)

    def _allocate(self, purpose: str, num_bytes: int) -> Tensor:
        room = find_host_room()
        if num_bytes > room.num_bytes:
            raise ConfigError(
                f"offloading needs {show_bytes(num_bytes, 2)} more host memory for {purpose}, and this "
                f"machine has {room} left: offload less, or give this rank fewer layers or rows"
            )
        slab = (
            make_pinned(purpose, num_bytes)
            if self._pin
            else torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        )
        self._slabs.append(slab)
        self._ledger.hold(purpose, "host", slab.numel())
        return slab


@dataclass(frozen=True)
class Memory:
    """What all that holds memory on one rank shares."""

    device: torch.device
    streams: Streams
    pool: HostPool
    ledger: Ledger

    @classmethod
    def of(cls, device: torch.device, streams: Streams) -> Memory:
        ledger = Ledger()
        return cls(device, streams, HostPool(ledger, pin=device.type == "cuda"), ledger)
