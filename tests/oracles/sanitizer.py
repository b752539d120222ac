"""torch's own CUDA sanitizer as a second judge of the same work, which shares no line with our clocks.

On a GPU `torch.cuda._sanitizer` is told of kernels, events and memory by torch itself; its handler needs no
GPU, so here it is told from what was written down. It is private: only tests use it, as nothing public judges
streams. It knows memory by data pointers, so of ranges that overlap it compares those that begin at the same
byte; memory that nobody has written, and what the host itself reads, it does not judge.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Iterable
from typing import assert_never
from unittest import mock

from stream_work import (
    Allocate,
    Buffer,
    Free,
    HostRead,
    Launch,
    Output,
    Range,
    Record,
    Step,
    Synchronize,
    Wait,
    Work,
)
from torch.cuda._sanitizer import AccessType, EventHandler

Pair = tuple[str, str, str]
"""Kind, earlier and later stream, as `RaceStreams.pairs` has them."""


def sanitize(trace: Iterable[Work]) -> set[Pair]:
    """What torch's sanitizer finds first; nothing where all is in order."""
    judge = _Sanitizer()
    # It keeps the stack of every kernel for its messages, which takes longer than all else.
    no_stack = traceback.StackSummary()
    with mock.patch.object(traceback.StackSummary, "extract", lambda *_, **__: no_stack):
        for work in trace:
            judge.see(work)
            if judge.found:
                break
    return judge.found


class _Sanitizer:
    def __init__(self) -> None:
        self.found: set[Pair] = set()
        self._handler = EventHandler()
        self._names: dict[int, str] = {}
        self._pointers: defaultdict[Buffer, dict[int, int]] = defaultdict(dict)
        """By the first byte of what was used of it; no memory is given out twice, so that no pointer is."""
        self._num_pointers = 0
        self._freed: defaultdict[int, list[Buffer]] = defaultdict(list)

    def see(self, work: Work) -> None:
        match work:
            case Launch(step, ranges):
                self._launch(step, ranges)
            case Output(step, touched):
                self._launch(step, (touched,))
            case Allocate(step):
                self._allocate(step)
            case Free(buffer, pool):
                if pool is not None:
                    self._freed[pool].append(buffer)
            case Record(event, stream):
                self._handler._handle_event_creation(event)
                self._handler._handle_event_record(event, stream)
            case Synchronize(event):
                self._handler._handle_event_synchronization(event)
            case HostRead():
                """It knows nothing of the host."""
            case Wait(event, stream):
                self._handler._handle_event_wait(event, stream)
            case _:
                assert_never(work)

    def _allocate(self, step: Step) -> None:
        """A pool may give out again what was freed to it: as if the stream wrote all of that."""
        buffers = self._freed.pop(step.stream, ())
        freed = [(buffer, start) for buffer in buffers for start in self._pointers[buffer]]
        self._launch(
            step, [Range(buffer, start, start + 1, True) for buffer, start in freed], "memory reused"
        )
        for buffer, start in freed:
            self._handler._handle_memory_deallocation(self._pointer(buffer, start))

    def _pointer(self, buffer: Buffer, start: int) -> int:
        known = self._pointers[buffer]
        if start not in known:
            self._num_pointers += 1
            known[start] = self._num_pointers
            self._handler._handle_memory_allocation(self._num_pointers)
        return known[start]

    def _launch(self, step: Step, ranges: Iterable[Range], kind: str = "") -> None:
        self._names[step.stream] = step.stream_name
        written = {self._pointer(touched.buffer, touched.start) for touched in ranges if touched.writes}
        read = {self._pointer(touched.buffer, touched.start) for touched in ranges if not touched.writes}
        aliases = {pointer: [""] for pointer in read | written}
        errors = self._handler._handle_kernel_launch(step.stream, read - written, written, set(), "", aliases)
        for error in errors:
            earlier, later = error.previous_access, error.current_access
            pair = f"{_NAMES[earlier.type]}-{_NAMES[later.type]}"
            self.found.add((kind or pair, self._names[earlier.stream], self._names[later.stream]))


_NAMES = {AccessType.READ: "read", AccessType.WRITE: "write"}
