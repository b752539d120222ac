"""Device tensors that live in host memory between uses.

The tensor objects stay; the storage behind them is given back and refilled, so that whoever holds
them (FSDP2's DTensors, an optimizer's state) sees nothing but their values. FSDP2's public API has
no such offload: its `CPUOffloadPolicy` runs the optimizer on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zorselike.cost.purposes import Purpose
from zorselike.runtime._compat import grow_storage
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.memory.streams import Event, Stream
from zorselike.runtime.memory.turns import copy_in_turns


class Located(NamedTuple):
    """Where a tensor's values are."""

    values: Tensor
    is_away: bool = False
    """On the host, not on the device."""
    left: Event | None = None
    """Then the copy that brought them there, after which they are whole."""

    def whole(self) -> Tensor:
        """The values, once they are whole."""
        if self.left is not None:
            self.left.synchronize()
        return self.values


class HostBackedTensors:
    """Tensors with a host copy, moved together, by whatever names them.

    All are on the device at first, and nobody else uses their storages.
    """

    def __init__(
        self,
        tensors: Mapping[Any, Tensor],
        *,
        purpose: Purpose,
        memory: Memory,
        homes: Sequence[Stream],
        inbound: Stream,
    ) -> None:
        """`homes`: streams of which one has allocated them; `inbound`: the one that brings them back.
        Enters them in the ledger."""
        filled = {key: t.detach() for key, t in tensors.items() if t.untyped_storage().nbytes()}
        storages: dict[int, torch.UntypedStorage] = {}
        """By address: several tensors may share one."""
        for tensor in filled.values():
            storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        numbers = {address: number for number, address in enumerate(storages)}
        self._number_of = {key: numbers[t.untyped_storage().data_ptr()] for key, t in filled.items()}
        self._storages = list(storages.values())
        self._device = next((tensor.device for tensor in filled.values()), torch.device("cpu"))
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._purpose = purpose
        self._memory = memory
        self._homes, self._inbound = tuple(homes), inbound
        memory.pool.reserve(purpose, self._sizes)
        self._host = [memory.pool.take(purpose, size) for size in self._sizes]
        memory.ledger.hold(purpose, "device", self.num_bytes)
        self._arrived: Event | None = None
        self._left: Event | None = None
        """The last copy to the host, which the next copy from it must follow."""
        self.is_on_device = True

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def outbound(self) -> Stream:
        """The stream that takes them to the host."""
        return self._memory.streams.store

    def load(self) -> None:
        """Starts the copies to the device; users call `arrive` first."""
        assert not self.is_on_device
        load = self._inbound
        if self._left is not None:
            load.wait(self._left)
        with load.use():
            self._refill()
        copy_in_turns(zip(self._bytes(), self._host, strict=True), load, self._memory.streams.beside(load))
        self._homes, self._arrived = (load,), load.record()

    def make_room(self, stream: Stream) -> None:
        """Storage without values, for a `stream` that is about to write all of them."""
        assert not self.is_on_device
        with stream.use():
            self._refill()
        self._homes, self._arrived = (stream,), None

    def arrive(self, stream: Stream) -> None:
        """Makes `stream` wait for the copies that `load` started."""
        if self._arrived is not None:
            stream.wait(self._arrived)

    def store(self, written: Event) -> Event:
        """Starts the copies to the host, after `written`; gives the event of their end."""
        assert self.is_on_device
        store = self.outbound
        store.wait(written)
        copy_in_turns(zip(self._host, self._bytes(), strict=True), store, self._memory.streams.beside(store))
        self._left = store.record()
        return self._left

    def free(self, last_use: Event) -> None:
        """Gives the device memory back once `last_use` is over."""
        assert self.is_on_device
        self._wait_homes(last_use)
        for storage in self._storages:
            storage.resize_(0)
        self._memory.ledger.drop(self._purpose, "device", self.num_bytes)
        self.is_on_device = False
        self._arrived = None

    def _wait_homes(self, last_use: Event) -> None:
        if self._storages:  # Else there is nothing to give back, and what follows there need not wait.
            for home in self._homes:
                home.wait(last_use)

    def discard(self, last_use: Event) -> None:
        """Lets go of the tensors after `last_use`, and of the host copy once nothing is on its way."""
        self._wait_homes(last_use)
        if self._left is not None:
            self._left.synchronize()
        for buffer in self._host:
            self._memory.pool.give_back(self._purpose, buffer)
        self._host = []
        if self.is_on_device:
            self._memory.ledger.drop(self._purpose, "device", self.num_bytes)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._number_of

    def host_copy(self, key: Hashable, like: Tensor) -> Located:
        """The host's values of tensor `key`, which looks like `like` and is not on the device."""
        assert not self.is_on_device
        if key not in self._number_of:
            return Located(torch.empty_like(like, device="cpu"), is_away=True)
        values = self._host[self._number_of[key]].view(like.dtype)
        offset = values.storage_offset() + like.storage_offset()
        return Located(values.as_strided(like.size(), like.stride(), offset), is_away=True, left=self._left)

    def _refill(self) -> None:
        for storage, size in zip(self._storages, self._sizes, strict=True):
            grow_storage(storage, size)
        self._memory.ledger.hold(self._purpose, "device", self.num_bytes)
        self.is_on_device = True

    def _bytes(self) -> list[Tensor]:
        """Each storage as a tensor of bytes."""
        return [torch.empty(0, dtype=torch.uint8, device=self._device).set_(s) for s in self._storages]


class HostBackedParts(ABC):
    """Several `HostBackedTensors` that move together."""

    @abstractmethod
    def host_backed(self) -> Sequence[HostBackedTensors]:
        """All of them, in the order in which they are loaded."""

    def load(self) -> None:
        """Starts their way to the device."""
        for tensors in self.host_backed():
            tensors.load()

    def arrive(self, stream: Stream) -> None:
        """Makes `stream` wait for what `load` started."""
        for tensors in self.host_backed():
            tensors.arrive(stream)

    def recover(self, last_use: Event) -> None:
        """After an unfinished step: to the host with what is on the device."""
        for tensors in self.host_backed():
            if tensors.is_on_device:
                tensors.arrive(tensors.outbound)  # Perhaps nobody has waited for the load.
                tensors.free(tensors.store(last_use))

    def locate(self, key: Hashable, tensor: Tensor) -> Located:
        """Where the values of one of them are, or of a tensor that never moves."""
        for tensors in self.host_backed():
            if key in tensors and not tensors.is_on_device:
                return tensors.host_copy(key, tensor)
        return Located(tensor)


class PendingOffloads:
    """Tensors on their way to the host, freed one ministage later.

    Freeing at once would make the loading stream wait for the copy to the host, so that copies each
    way took turns; a ministage later the copy is over, and nobody waits.
    """

    def __init__(self) -> None:
        self._leaving: deque[tuple[list[HostBackedTensors], Event]] = deque()

    def add(self, tensors: list[HostBackedTensors], gone: Event) -> None:
        """`gone`: the end of their copies to the host."""
        self.settle(keep=0)
        self._leaving.append((tensors, gone))

    def settle(self, *, keep: int = 0) -> None:
        """Frees all but the newest `keep` entries."""
        while len(self._leaving) > keep:
            leaving, gone = self._leaving.popleft()
            for tensors in leaving:
                tensors.free(gone)


class DeferredFrees:
    """Tensors that nobody needs any more once an event is over: their last references."""

    def __init__(self) -> None:
        self._kept: list[tuple[Stream, Event, Any]] = []

    def add(self, home: Stream, last_use: Event, tensors: Any) -> None:
        """`home`: the stream on which they were allocated."""
        self._kept.append((home, last_use, tensors))

    def settle(self) -> None:
        """Drops all, after their home streams wait for their last uses."""
        for home, last_use, _ in self._kept:
            home.wait(last_use)
        self._kept.clear()
