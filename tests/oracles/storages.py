"""The storages that a rank's operators have used, and where their memory goes when they are gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from stream_work import Allocate, Buffer, Free, Range, Step, Work, byte_range
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# What `StorageWeakRef.expired` asks, without the three calls around it: it is asked millions of times.
_is_expired: Callable[[int], bool] = torch.UntypedStorage._expired  # type: ignore[attr-defined]

_FIRST_LIMIT = 4096
"""Storages known before those that are gone are looked for."""


@dataclass(eq=False)
class _Known:
    """One storage."""

    reference: StorageWeakRef
    buffer: Buffer
    owner: int | None = None
    """The stream to whose pool it returns; None where not known: it was there before."""
    was_resized: bool = False
    is_host: bool = False


class Storages:
    """All storages seen; `give` is told when their memory is allocated and freed.

    `default` is the stream to whose pool goes what was there before.
    """

    def __init__(self, give: Callable[[Work], None], *, default: int) -> None:
        self._give = give
        self._default = default
        self._known: dict[int, _Known] = {}
        self._owned: defaultdict[int, set[int]] = defaultdict(set)
        self._limit = _FIRST_LIMIT

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._known

    def buffer(self, storage: torch.UntypedStorage) -> Buffer:
        """The memory that a storage has now."""
        return self._find(storage).buffer

    def range(self, tensor: Tensor, *, writes: bool) -> Range:
        """A tensor's bytes."""
        return Range(self.buffer(tensor.untyped_storage()), *byte_range(tensor), writes)

    def allocate(self, storage: torch.UntypedStorage, num_bytes: int, step: Step) -> None:
        """The storage gets its memory from the pool of the step's stream just now."""
        self._sweep(list(self._owned[step.stream]))
        known = self._find(storage)
        known.owner = step.stream
        known.buffer = Buffer(num_bytes, known.buffer.name, step)
        self._owned[step.stream].add(storage._cdata)
        self._give(Allocate(step, known.buffer))

    def mark_host(self, storage: torch.UntypedStorage) -> None:
        """The storage's memory comes from the host, not from a pool; it was not used yet."""
        known = self._find(storage)
        if known.owner is not None:
            self._owned[known.owner].discard(storage._cdata)
        known.owner, known.is_host, known.buffer = None, True, Buffer(storage.nbytes())

    def resize(self, storage: torch.UntypedStorage, size: int, step: Step) -> None:
        """The storage is about to get another size in bytes."""
        known = self._find(storage)
        known.was_resized = True
        if storage.nbytes():
            self._free(known, self._default)
        known.buffer = Buffer(size, known.buffer.name)
        if size:
            self.allocate(storage, size, step)

    def resident_bytes(self) -> int:
        """Bytes of all living storages that were ever resized."""
        return sum(
            k.buffer.num_bytes
            for k in self._known.values()
            if k.was_resized and not _is_expired(k.reference.cdata)
        )

    def _find(self, storage: torch.UntypedStorage) -> _Known:
        # The weak reference keeps this address from being given to another storage.
        if storage._cdata not in self._known:
            if len(self._known) > self._limit:
                self._sweep(list(self._known))
                self._limit = 2 * max(len(self._known), _FIRST_LIMIT)
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._known[storage._cdata] = _Known(reference, Buffer(storage.nbytes()))
        return self._known[storage._cdata]

    def _sweep(self, addresses: Sequence[int]) -> None:
        """Frees those storages that nobody refers to any more."""
        for address in filter(_is_expired, addresses):
            self._free(self._known.pop(address), None)

    def _free(self, known: _Known, otherwise: int | None) -> None:
        """Gives the memory back to its owner's pool, or to `otherwise`."""
        owner = otherwise if known.owner is None else known.owner
        if owner is not None:
            self._owned[owner].discard(known.reference.cdata)
        self._give(Free(known.buffer, None if known.is_host else owner))
        known.owner = None
