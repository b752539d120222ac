"""Activations that wait in host memory between a microbatch's forward and its backward.

A microbatch of a ministage keeps what autograd saves, and the inputs of its recomputed layers.
Each storage is kept once, whoever saved how many views of it; gathered parameters and buffers are
left alone, since they are there again when the backward runs. Copies start when the schedule says
`OFFLOAD` and `LOAD`, one event for all of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zorselike.cost.purposes import Purpose
from zorselike.runtime._compat import version_of
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.memory.streams import Event
from zorselike.runtime.model.nested import map_leaves, map_tensors
from zorselike.schedule.copies_in_flight import CopiesInFlight

Key = Hashable
"""One microbatch of one ministage."""

_WHOLE_SHARE = 0.5
"""A view that covers less of its storage than this is copied by itself."""


@dataclass
class _Kept:
    """One storage of a microbatch: on the device, or on the host, or on its way."""

    num_bytes: int
    device: Tensor | None
    """All bytes of the storage, as `uint8`."""
    host: Tensor | None = None
    is_pooled: bool = False
    """Whether `host` is the pool's; otherwise it came with the data, which was received through it."""


@dataclass
class Saved:
    """How to make a saved tensor again from its storage."""

    kept: _Kept
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    is_conjugate: bool = False
    """Whether it was a conjugate view of that."""
    spread: tuple[int, ...] | None = None
    """The strides that it is to have, if those of what is kept, without the gaps, are others."""
    fault: str = ""
    """Why it must not be used: it was changed in place since."""

    def tensor(self) -> Tensor:
        if self.fault:
            raise RuntimeError(self.fault)
        device = self.kept.device
        assert device is not None, "a backward needs activations that were not loaded"
        made = torch.empty(0, dtype=self.dtype, device=device.device)
        made.set_(device.untyped_storage(), self.offset, self.size, self.stride)
        if self.spread is not None:
            spread = torch.empty_strided(self.size, self.spread, dtype=self.dtype, device=device.device)
            made = spread.copy_(made)
        return (made.conj() if self.is_conjugate else made).requires_grad_(self.requires_grad)


@dataclass
class _Microbatch:
    kept: dict[int, _Kept] = field(default_factory=dict)
    """Saved storages by address; valid while they are on the device."""
    versions: list[tuple[Saved, Tensor, int]] = field(default_factory=list)
    """What autograd saved, as long as it is on the device, and how often it had been changed by then."""
    left: Event | None = None
    """The end of the copies to the host."""
    loaded: Event | None = None

    def note_changes(self) -> None:
        """Marks what was changed in place since it was saved, so that using it raises as it would
        without offload."""
        for saved, tensor, version in self.versions:
            if version_of(tensor) != version:
                saved.fault = (
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: a {tensor.dtype} tensor of shape {list(tensor.shape)} is at version "
                    f"{version_of(tensor)}; expected version {version}"
                )
        self.versions.clear()


class ActivationOffload:
    """Activations of one rank's microbatches, from their forwards to their backwards."""

    def __init__(self, memory: Memory, *, keeps_strides: bool = False) -> None:
        """`keeps_strides`: what is saved comes back with those that it had, as compiled layers demand."""
        self._keeps_strides = keeps_strides
        self._device = memory.device
        self._pool, self._ledger, self._streams = memory.pool, memory.ledger, memory.streams
        self.device_marker = torch.zeros((), device=memory.device)
        """A tensor that says which device is computed on."""
        self._microbatches: dict[Key, _Microbatch] = {}
        self.leaving: CopiesInFlight[tuple[Event, list[Tensor]]] = CopiesInFlight()
        """The end of a microbatch's copies to the host, and what they read."""
        self._received: dict[int, Tensor] = {}
        self._recording: _Microbatch | None = None
        self.kept_bytes: dict[Key, int] = {}
        """Bytes that each microbatch kept when it last ran."""
        self._excluded: list[set[int]] = [{_address(self.device_marker)}]

    @property
    def is_keeping(self) -> bool:
        """Whether a forward runs whose activations are kept."""
        return self._recording is not None

    # -- forward ---------------------------------------------------------------------------

    @contextmanager
    def keeping(self, key: Key) -> Iterator[None]:
        """Inside, what autograd saves belongs to microbatch `key`."""
        self._recording = self._microbatches.setdefault(key, _Microbatch())
        try:
            with saved_tensors_hooks(self._save, _unpack):
                yield
        finally:
            self.kept_bytes[key] = sum(kept.num_bytes for kept in self._recording.kept.values())
            self._recording = None
            self._received.clear()

    @contextmanager
    def leaving_out(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Storages of these (gathered parameters, buffers) are not kept."""
        self._excluded.append({_address(tensor) for tensor in tensors})
        try:
            yield
        finally:
            self._excluded.pop()

    def note_host_copy(self, tensor: Tensor, host: Tensor) -> None:
        """What arrived through host memory is on the host already: it is not copied there again."""
        if self.is_keeping and host.untyped_storage().nbytes() == tensor.untyped_storage().nbytes():
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(host.untyped_storage())
            self._received[_address(tensor)] = whole

    def save_inputs(self, arguments: Any) -> Callable[[], Any]:
        """Keeps the tensors among a recomputed layer's arguments; what is returned makes them again."""
        packed = map_tensors(arguments, lambda t: self._pack(t, requires_grad=t.requires_grad))
        return lambda: map_leaves(packed, _unpack)

    def _save(self, tensor: Tensor) -> Any:
        """The saving hook: autograd itself cannot notice in-place changes of what is packed here."""
        packed = self._pack(tensor, requires_grad=False)
        if isinstance(packed, Saved) and self._recording is not None:
            self._recording.versions.append((packed, tensor.detach(), version_of(tensor)))
        return packed

    def _pack(self, tensor: Tensor, *, requires_grad: bool) -> Any:
        assert self._recording is not None
        is_conjugate = tensor.is_conj()
        view = (tensor.conj() if is_conjugate else tensor).detach().resolve_neg()
        address = _address(view)
        is_out = any(address in excluded for excluded in self._excluded)
        if not address or is_out or view.device != self._device:
            return tensor
        kept, strides = self._recording.kept.get(address), tuple(view.stride())
        if kept is None:
            is_small = view.numel() * view.itemsize < _WHOLE_SHARE * view.untyped_storage().nbytes()
            if is_small and not (self._keeps_strides and 0 in strides):
                view = view.clone()
            kept = self._keep(view)
        offset = int(view.storage_offset())
        size, stride = tuple(view.size()), tuple(view.stride())
        spread = strides if self._keeps_strides and stride != strides else None
        return Saved(kept, view.dtype, size, stride, offset, requires_grad, is_conjugate, spread)

    def _keep(self, view: Tensor) -> _Kept:
        assert self._recording is not None
        storage, address = view.untyped_storage(), _address(view)
        whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        kept = _Kept(storage.nbytes(), whole, host=self._received.get(address))
        self._recording.kept[address] = kept
        self._ledger.hold(Purpose.ACTIVATIONS, "device", kept.num_bytes)
        return kept

    # -- between ---------------------------------------------------------------------------

    def offload(self, key: Key) -> None:
        """Starts the copies of a microbatch to the host and gives up its device memory."""
        microbatch = self._microbatches[key]
        microbatch.note_changes()
        self._let_go(self.leaving.take_before_another())
        stream = self._streams.stash
        stream.wait(self._streams.compute.record())
        leaving: list[Tensor] = []
        self._pool.reserve(
            Purpose.ACTIVATIONS, [k.num_bytes for k in microbatch.kept.values() if k.host is None]
        )
        with stream.use():
            for kept in microbatch.kept.values():
                if kept.device is None:
                    continue
                if kept.host is None:
                    kept.host, kept.is_pooled = self._pool.take(Purpose.ACTIVATIONS, kept.num_bytes), True
                    kept.host.copy_(kept.device, non_blocking=True)
                leaving.append(kept.device)
                kept.device = None
        microbatch.left = stream.record()
        self.leaving.add((microbatch.left, leaving))

    def _let_go(self, copies: Iterable[tuple[Event, list[Tensor]]]) -> None:
        """Frees what has left; its memory is compute's to use again."""
        for event, tensors in copies:
            self._streams.compute.wait(event)
            self._ledger.drop(Purpose.ACTIVATIONS, "device", sum(tensor.numel() for tensor in tensors))

    def load(self, key: Key) -> None:
        """Starts the copies of a microbatch back to the device."""
        self._let_go(self.leaving.take_for_room())
        microbatch = self._microbatches[key]
        fetch = self._streams.fetch
        assert microbatch.left is not None, "only what was offloaded is loaded"
        fetch.wait(microbatch.left)
        with fetch.use():
            for kept in microbatch.kept.values():
                if kept.device is None:
                    assert kept.host is not None
                    kept.device = torch.empty(kept.num_bytes, dtype=torch.uint8, device=self._device)
                    kept.device.copy_(kept.host, non_blocking=True)
                    self._ledger.hold(Purpose.ACTIVATIONS, "device", kept.num_bytes)
        microbatch.loaded = fetch.record()

    # -- backward --------------------------------------------------------------------------

    def arrive(self, key: Key) -> None:
        """Before a backward: makes compute wait for what `load` started, and for what leaves, the oldest."""
        self._let_go(self.leaving.take_for_room())
        microbatch = self._microbatches.get(key)
        if microbatch is None:
            return
        microbatch.note_changes()
        if microbatch.loaded is not None:
            self._streams.compute.wait(microbatch.loaded)

    def drop(self, key: Key) -> None:
        """Frees a microbatch whose backward is queued."""
        microbatch = self._microbatches.pop(key, None)
        if microbatch is None:
            return
        microbatch.versions.clear()
        if microbatch.loaded is not None:
            # Loaded memory belongs to the fetching stream.
            self._streams.fetch.wait(self._streams.compute.record())
        for kept in microbatch.kept.values():
            if kept.device is not None:
                self._ledger.drop(Purpose.ACTIVATIONS, "device", kept.num_bytes)
                kept.device = None
            if kept.host is not None and kept.is_pooled:
                self._pool.give_back(Purpose.ACTIVATIONS, kept.host)
                kept.host = None

    def finish(self) -> None:
        """At the end of a step: compute waits for all copies to the host."""
        self._let_go(self.leaving.take_all())

    def forget(self) -> None:
        """Drops what an unfinished step kept."""
        for key in list(self._microbatches):
            self.arrive(key)  # Host memory that is still read on its way back is not written again.
            self.drop(key)
        self.finish()


def _unpack(saved: Any) -> Any:
    return saved.tensor() if isinstance(saved, Saved) else saved


def _address(tensor: Tensor) -> int:
    """Address of a tensor's storage, unique while that is alive; 0 for an empty one, and for a sparse tensor,
    which has none of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
