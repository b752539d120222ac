"""What a rank's streams are given, in the order in which its host gives it.

`stand_in.RaceStreams` writes it down from a running pipeline. Whoever judges the order reads it: vector
clocks (`memory_races`), torch's own sanitizer (`sanitizer`). What computes on a CPU rank does not depend on
waits, so one run serves for every wait that is left out: `without` leaves it out of what was written down.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Protocol

from torch import Tensor

Frames = tuple[tuple[str, int, str], ...]
"""File, line and function of our own callers, innermost first."""

_MOST_FRAMES = 4


@dataclass(frozen=True, slots=True)
class Step:
    """Something that a stream does."""

    stream: int
    stream_name: str
    text: str
    """The operator, after the test's label where it has one."""
    frames: Frames

    @property
    def place(self) -> str:
        return " < ".join(f"{Path(file).name}:{line} {name}" for file, line, name in self.frames) or "?"


@dataclass(eq=False, slots=True)
class Buffer:
    """The memory of one storage, from when it was allocated until it is freed."""

    num_bytes: int
    name: str = ""
    made_by: Step | None = None

    def describe(self) -> str:
        if self.name:
            return f"'{self.name}'"
        if self.made_by is None:
            return f"{self.num_bytes} bytes"
        return f"{self.num_bytes} bytes of {self.made_by.text} ({self.made_by.place})"


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a buffer that are read or written."""

    buffer: Buffer
    start: int
    stop: int
    writes: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """A stream starts a step, which does this to its arguments."""

    step: Step
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """What the step that a stream started last writes besides."""

    step: Step
    range: Range


@dataclass(frozen=True, slots=True)
class Allocate:
    """The buffer comes from the pool of the step's stream, where freed memory is given out again."""

    step: Step
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Free:
    """The buffer goes back to the pool of a stream; to none where that is not known."""

    buffer: Buffer
    pool: int | None


@dataclass(frozen=True, slots=True)
class Record:
    """An event after all that a stream was given."""

    event: int
    stream: int
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """What a stream is given next comes after an event."""

    event: int
    stream: int
    frames: Frames = ()
    of_fsdp: bool = False


@dataclass(frozen=True, slots=True)
class Synchronize:
    """What the host starts next, and does itself, comes after an event."""

    event: int
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class HostRead:
    """The host reads bytes without asking any stream."""

    step: Step
    range: Range


Work = Launch | Output | Allocate | Free | Record | Wait | Synchronize | HostRead
Order = Record | Wait | Synchronize
"""What makes one thing come after another."""


class Judge(Protocol):
    """Told all work in its order, says which of it nothing puts in order."""

    def see(self, work: Work) -> None: ...


class Trace:
    """A judge that only writes down what it is told."""

    def __init__(self) -> None:
        self.work: list[Work] = []

    def see(self, work: Work) -> None:
        self.work.append(work)


def without(trace: Sequence[Work], is_left_out: Callable[[Order], bool]) -> Iterator[Work]:
    """The same work where some of what orders it is forgotten: an event that is not recorded is over."""
    unrecorded = set()
    for work in trace:
        if isinstance(work, Order):
            if is_left_out(work):
                if isinstance(work, Record):
                    unrecorded.add(work.event)
                continue
            if work.event in unrecorded:
                continue
        yield work


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and that after its last."""
    first = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (first + int(last) + 1) * tensor.itemsize


_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "<")
_TOOL = frozenset(
    str(Path(__file__).with_name(name)) for name in ("stream_work.py", "storages.py", "stand_in.py")
)


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
