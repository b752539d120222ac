"""Who read and wrote which bytes of which memory, and when: races, found by vector clocks.

When is a clock: by stream, how many of its steps are over. An access comes before whatever a stream
does with a clock that counts it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, assert_never

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

Clock = dict[int, int]
"""By the number of a stream: how many of its steps are over."""


@dataclass(frozen=True, slots=True)
class _Access:
    """What one step of a stream did to a range of bytes."""

    step: Step
    count: int
    """Of the stream's steps, this one included."""
    start: int
    stop: int
    writes: bool

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.step.stream, 0) >= self.count

    def overlaps(self, other: Range) -> bool:
        return self.start < other.stop and other.start < self.stop


class StreamRace(AssertionError):
    """Two accesses to the same memory that nothing puts in order."""

    def __init__(self, kind: str, buffer: Buffer, earlier: Step | None, later: Step) -> None:
        self.kind = kind
        """"write-read", "read-write", "write-write", "memory reused", "host read" or "freed"."""
        self.earlier_stream = earlier.stream_name if earlier else ""
        self.later_stream = later.stream_name
        lines = [f"{kind}, {buffer.describe()}: {later.text} on '{later.stream_name}'", f"  at {later.place}"]
        if earlier is not None:
            lines[0] += f" does not wait for {earlier.text} on '{earlier.stream_name}'"
            lines.append(f"  nor waited for {earlier.place}")
        super().__init__("\n".join(lines))


class Clocks:
    """Judges by vector clocks; `raises` the first race where it happens."""

    def __init__(self, *, raises: bool = False) -> None:
        self.races: list[StreamRace] = []
        self._raises = raises
        self._reported: dict[tuple[Any, ...], StreamRace] = {}
        self._host: Clock = {}
        self._of_stream: dict[int, Clock] = {}
        self._of_event: dict[int, Clock] = {}
        self._accesses: defaultdict[Buffer, list[_Access]] = defaultdict(list)
        self._freed: defaultdict[int, list[tuple[Buffer, list[_Access]]]] = defaultdict(list)
        """By the stream of a pool: what it will give out again."""

    def see(self, work: Work) -> None:
        match work:
            case Launch(step, ranges):
                clock = self._after_host(step.stream)
                clock[step.stream] += 1
                for touched in ranges:
                    self._access(step, touched)
            case Output(step, touched):
                self._access(step, touched)
            case Allocate(step, buffer):
                self._allocate(step, buffer)
            case Free(buffer, pool):
                accesses = self._accesses.pop(buffer, [])
                if pool is not None:
                    self._freed[pool].append((buffer, accesses))
            case Record(event, stream):
                self._of_event[event] = dict(self._after_host(stream))
            case Wait(event, stream):
                self._learn(stream, self._of_event[event])
            case Synchronize(event):
                _merge(self._host, self._of_event[event])
            case HostRead(step, touched):
                for earlier in self._accesses[touched.buffer]:
                    is_due = earlier.writes and earlier.overlaps(touched)
                    if is_due and not earlier.is_before(self._host):
                        self.report("host read", touched.buffer, earlier.step, step)
            case _:
                assert_never(work)

    def num_before(self, stream: int, other: int) -> int:
        """How many steps of another stream come before all that a stream is given from now on."""
        return self._of_stream.get(stream, {}).get(other, 0)

    def report(self, kind: str, buffer: Buffer, earlier: Step | None, later: Step) -> StreamRace:
        """Adds a race, unless the same lines raced already."""
        key = (kind, later.stream, later.frames, earlier and (earlier.stream, earlier.frames))
        if key not in self._reported:
            self._reported[key] = StreamRace(kind, buffer, earlier, later)
            self.races.append(self._reported[key])
        if self._raises:
            raise self._reported[key]
        return self._reported[key]

    def _learn(self, stream: int, other: Clock) -> Clock:
        """What follows comes after this clock; an event recorded earlier does not cover it."""
        clock = self._of_stream.setdefault(stream, {stream: 0})
        if _merge(clock, other):
            clock[stream] += 1
        return clock

    def _after_host(self, stream: int) -> Clock:
        return self._learn(stream, self._host)

    def _allocate(self, step: Step, buffer: Buffer) -> None:
        """Memory freed to this pool may come back from it now."""
        clock = self._after_host(step.stream)
        for freed, accesses in self._freed.pop(step.stream, ()):
            for last in accesses:
                if not last.is_before(clock):
                    self.report("memory reused", freed, last.step, step)
        # Whoever uses it elsewhere must come after what its own stream was doing by then.
        self._accesses[buffer] = [_Access(step, clock[step.stream], 0, sys.maxsize, True)]

    def _access(self, step: Step, touched: Range) -> None:
        buffer, writes = touched.buffer, touched.writes
        clock = self._of_stream[step.stream]
        kept = []
        for earlier in self._accesses[buffer]:
            if not earlier.overlaps(touched):
                kept.append(earlier)
                continue
            is_ordered = earlier.is_before(clock)
            if not is_ordered and (writes or earlier.writes):
                kind = f"{'write' if earlier.writes else 'read'}-{'write' if writes else 'read'}"
                self.report(kind, buffer, earlier.step, step)
                is_ordered = True  # Told once; whoever follows is measured against the later one.
            # Whoever comes after this access also comes after those that came before it.
            is_inside = touched.start <= earlier.start and min(earlier.stop, buffer.num_bytes) <= touched.stop
            if not (is_ordered and is_inside and (writes or not earlier.writes)):
                kept.append(earlier)
        kept.append(_Access(step, clock[step.stream], touched.start, touched.stop, writes))
        self._accesses[buffer] = kept


def _merge(into: Clock, other: Clock) -> bool:
    """Whether there was anything new in `other`."""
    news = {number: count for number, count in other.items() if into.get(number, 0) < count}
    into.update(news)
    return bool(news)
