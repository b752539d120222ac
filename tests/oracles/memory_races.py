"""Memory as a race detector sees it: who read and wrote which bytes of which storage, and when.

When is a clock: by stream, how many of its steps are over. An access comes before whatever a stream
does with a clock that counts it.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict[int, int]
"""By the number of a stream: how many of its steps are over."""
Frames = tuple[tuple[str, int, str], ...]
"""File, line and function of our own callers, innermost first."""

_MOST_FRAMES = 4
_FIRST_LIMIT = 4096
"""Storages known before those that are gone are looked for."""


def merge(into: Clock, other: Clock) -> bool:
    """Whether there was anything new in `other`."""
    news = {number: count for number, count in other.items() if into.get(number, 0) < count}
    into.update(news)
    return bool(news)


@dataclass(eq=False, slots=True)
class Access:
    """What one step of a stream did to a range of bytes; without a range, the step itself."""

    stream: int
    count: int
    """Of the stream's steps, this one included."""
    stream_name: str
    text: str
    """The operator, after the test's label where it has one."""
    frames: Frames
    start: int = 0
    stop: int = 0
    writes: bool = False

    def of(self, start: int, stop: int, *, writes: bool) -> Access:
        """The same step, on a range of bytes."""
        who = (self.stream, self.count, self.stream_name, self.text, self.frames)
        return Access(*who, start, stop, writes)

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.count

    def overlaps(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop

    @property
    def place(self) -> str:
        return " < ".join(f"{Path(file).name}:{line} {name}" for file, line, name in self.frames) or "?"


class StreamRace(AssertionError):
    """Two accesses to the same memory that nothing puts in order."""

    def __init__(self, kind: str, buffer: str, earlier: Access | None, later: Access) -> None:
        self.kind = kind
        """"write-read", "read-write", "write-write", "memory reused", "host read" or "freed"."""
        self.buffer = buffer
        self.earlier_stream = earlier.stream_name if earlier else ""
        self.later_stream = later.stream_name
        lines = [f"{kind}, {buffer}: {later.text} on '{later.stream_name}'", f"  at {later.place}"]
        if earlier is not None:
            lines[0] += f" does not wait for {earlier.text} on '{earlier.stream_name}'"
            lines.append(f"  nor waited for {earlier.place}")
        super().__init__("\n".join(lines))


@dataclass(eq=False)
class Buffer:
    """One storage."""

    reference: StorageWeakRef
    num_bytes: int
    owner: int | None = None
    """The stream to whose pool it returns; None where not known: it was there before."""
    name: str = ""
    made_by: Access | None = None
    accesses: list[Access] = field(default_factory=list)
    was_resized: bool = False
    is_host: bool = False

    @property
    def is_gone(self) -> bool:
        return bool(self.reference.expired())  # type: ignore[no-untyped-call]

    def describe(self) -> str:
        if self.name:
            return f"'{self.name}'"
        if self.made_by is None:
            return f"{self.num_bytes} bytes"
        return f"{self.num_bytes} bytes of {self.made_by.text} ({self.made_by.place})"


class Memory:
    """All storages seen, and what has been freed to each stream's pool.

    `report(kind, buffer, earlier, later)` is told of races; `default` is the stream to whose pool
    goes what was there before.
    """

    def __init__(
        self, report: Callable[[str, Buffer, Access | None, Access], StreamRace], *, default: int
    ) -> None:
        self._report = report
        self._default = default
        self._buffers: dict[int, Buffer] = {}
        self._owned: defaultdict[int, set[int]] = defaultdict(set)
        self._freed: defaultdict[int, list[tuple[Buffer, Access]]] = defaultdict(list)
        self._limit = _FIRST_LIMIT

    def buffer(self, storage: torch.UntypedStorage) -> Buffer:
        """What is known of a storage."""
        # The weak reference keeps this address from being given to another storage.
        if storage._cdata not in self._buffers:
            if len(self._buffers) > self._limit:
                self._sweep(list(self._buffers))
                self._limit = 2 * max(len(self._buffers), _FIRST_LIMIT)
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._buffers[storage._cdata] = Buffer(reference, storage.nbytes())
        return self._buffers[storage._cdata]

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._buffers

    def allocate(self, storage: torch.UntypedStorage, clock: Clock, step: Access) -> None:
        """The storage gets its memory from the pool of the step's stream just now."""
        self._check_pool(clock, step)
        buffer = self.buffer(storage)
        self._owned[step.stream].add(storage._cdata)
        buffer.owner, buffer.made_by, buffer.num_bytes = step.stream, step, storage.nbytes()
        # Whoever uses it elsewhere must come after what its own stream was doing by then.
        buffer.accesses = [step.of(0, sys.maxsize, writes=True)]

    def mark_host(self, buffer: Buffer) -> None:
        """The buffer's memory comes from the host, not from a pool; it was not used yet."""
        if buffer.owner is not None:
            self._owned[buffer.owner].discard(buffer.reference.cdata)
        buffer.owner, buffer.is_host, buffer.accesses = None, True, []

    def resize(self, storage: torch.UntypedStorage, size: int, clock: Clock, step: Access) -> None:
        """The storage is about to get another size in bytes."""
        buffer = self.buffer(storage)
        buffer.was_resized = True
        if storage.nbytes():
            self._free(buffer, self._default)
        if size:
            self.allocate(storage, clock, step)
        buffer.num_bytes = size

    def access(self, tensor: Tensor, clock: Clock, step: Access, *, writes: bool) -> None:
        """The step's stream, whose clock this is, reads or writes a tensor's bytes."""
        if not tensor.numel():
            return
        storage = tensor.untyped_storage()
        buffer = self.buffer(storage)
        if not storage.nbytes():
            raise self._report("freed", buffer, None, step)  # The operator would crash.
        start, stop = _byte_range(tensor)
        kept = []
        for earlier in buffer.accesses:
            if not earlier.overlaps(start, stop):
                kept.append(earlier)
                continue
            is_ordered = earlier.is_before(clock)
            if not is_ordered and (writes or earlier.writes):
                kind = f"{'write' if earlier.writes else 'read'}-{'write' if writes else 'read'}"
                self._report(kind, buffer, earlier, step)
                is_ordered = True  # Told once; whoever follows is measured against the later one.
            # Whoever comes after this access also comes after those that came before it.
            is_inside = start <= earlier.start and min(earlier.stop, storage.nbytes()) <= stop
            if not (is_ordered and is_inside and (writes or not earlier.writes)):
                kept.append(earlier)
        buffer.accesses = [*kept, step.of(start, stop, writes=writes)]

    def check_host_read(self, tensor: Tensor, host: Clock, step: Access) -> None:
        """The host reads a tensor's bytes without asking any stream."""
        buffer = self.buffer(tensor.untyped_storage())
        for earlier in buffer.accesses:
            is_due = earlier.writes and earlier.overlaps(*_byte_range(tensor))
            if is_due and not earlier.is_before(host):
                self._report("host read", buffer, earlier, step)

    def resident_bytes(self) -> int:
        """Bytes of all living storages that were ever resized."""
        return sum(b.num_bytes for b in self._buffers.values() if b.was_resized and not b.is_gone)

    def _check_pool(self, clock: Clock, step: Access) -> None:
        """Memory freed to this pool may come back from it now."""
        self._sweep(list(self._owned[step.stream]))
        for buffer, last in self._freed.pop(step.stream, ()):
            if not last.is_before(clock):
                self._report("memory reused", buffer, last, step)

    def _sweep(self, addresses: Sequence[int]) -> None:
        """Frees those storages that nobody refers to any more."""
        for address in addresses:
            if self._buffers[address].is_gone:
                buffer = self._buffers.pop(address)
                self._free(buffer, buffer.owner)

    def _free(self, buffer: Buffer, otherwise: int | None) -> None:
        """Gives the memory back to its owner's pool, or to `otherwise`."""
        owner = otherwise if buffer.owner is None else buffer.owner
        if owner is not None and not buffer.is_host:
            # A description of its own: the storage may get other memory later.
            self._freed[owner] += [(replace(buffer), access) for access in buffer.accesses]
            self._owned[owner].discard(buffer.reference.cdata)
        buffer.accesses, buffer.owner = [], None


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and that after its last."""
    first = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (first + int(last) + 1) * tensor.itemsize


_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "<")
_TOOL = frozenset(str(Path(__file__).with_name(name)) for name in ("memory_races.py", "stand_in.py"))


@cache
def _is_own(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and file not in _TOOL


def own_frames() -> Frames:
    """Where the caller is, without libraries and the detector itself."""
    found: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _MOST_FRAMES:
        if _is_own(frame.f_code.co_filename):
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)
