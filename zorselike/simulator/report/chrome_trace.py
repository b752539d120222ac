"""A simulated step as a Chrome trace, which Perfetto and chrome://tracing open.

Processes are ranks, and threads are a rank's resources: compute stream, copies, collectives and transfers.
Events are named as in a real run's trace (`zorselike/train/report/trace.py`): by their actions. Times are in
microseconds, as the format prescribes
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from zorselike.errors import ConfigError
from zorselike.schedule.actions import FORWARDS, RECEIVES, SENDS, Action, Kind
from zorselike.simulator.result import Span, Track
from zorselike.simulator.simulated_plan import SimulatedPlan

Event = dict[str, Any]

_TRACKS: tuple[Track, ...] = get_args(Track)
_WIRES: tuple[Track, ...] = ("send", "receive")
_MICROSECONDS = 1e6
_DIGITS = 3
"""Decimals of a microsecond: viewers count nanoseconds."""
_MIB = 2**20


class _Thread(NamedTuple):
    """A thread of the trace, whose spans do not overlap: viewers drop those that do."""

    rank: int
    position: int
    """Position of its track in `_TRACKS`."""
    peer: int
    """Rank that rows are sent to or received from; -1 for other tracks."""
    number: int
    """Number among the threads of the same track and peer."""

    @property
    def name(self) -> str:
        track = _TRACKS[self.position]
        if self.peer >= 0:
            name = f"{track} {'to' if track == 'send' else 'from'} {self.peer}"
        else:
            name = f"{track} tied weights" if track in _WIRES else track
        return name if self.number == 0 else f"{name} ({self.number + 1})"


def make_trace(simulated: SimulatedPlan, *, measured: Iterable[Event] = ()) -> dict[str, Any]:
    """The trace of a step whose spans were recorded. It begins with the earliest event: a rank that ended the
    previous step early begins before the step.

    `measured`: events of a real step (`simulator/report/measured_trace.py`), shown below in the same window.
    """
    spans = sorted(simulated.simulation.spans, key=lambda span: (span.start_s, span.stop_s))
    memory = [(rank, simulated.simulation.memory_over_time(rank)) for rank in range(simulated.plan.num_ranks)]
    starts = [span.start_s for span in spans] + [start_s for _, points in memory for start_s, _ in points]
    began_s = min(0.0, *starts)
    threads = _assign_threads(spans)
    numbers = {thread: number for number, thread in enumerate(sorted(set(threads)))}
    slices = [_slice(span, numbers[thread], began_s) for span, thread in zip(spans, threads, strict=True)]
    events = [
        *_name_tracks(simulated, numbers),
        *slices,
        # Only these: a transfer through host memory has copies with the same action.
        *make_flows(
            (span.rank, span.action, event)
            for span, event in zip(spans, slices, strict=True)
            if span.track in _WIRES
        ),
        *(_count(rank, start_s - began_s, size) for rank, points in memory for start_s, size in points),
        *measured,
    ]
    # Names first, then by time: some readers of the format want that.
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(trace: Mapping[str, Any], path: str | Path) -> None:
    """Writes a trace as JSON, gzipped if the name ends in `.gz`; raises `ConfigError` if it cannot."""
    target = Path(path)
    data = json.dumps(trace, separators=(",", ":")).encode()
    try:
        target.write_bytes(gzip.compress(data, compresslevel=5) if target.suffix == ".gz" else data)
    except OSError as error:
        raise ConfigError(f"{path}: the trace cannot be written: {error.strerror}") from None


# -- tracks ------------------------------------------------------------------------------------


def name_process(pid: int, name: str) -> list[Event]:
    """Names a process; processes are ordered by number."""
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
    ]


def name_thread(pid: int, tid: int, name: str) -> list[Event]:
    """Names a thread; threads are ordered by number."""
    return [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}},
    ]


def _name_tracks(simulated: SimulatedPlan, numbers: Mapping[_Thread, int]) -> list[Event]:
    events = []
    for rank, device_type in enumerate(simulated.device_types):
        events += name_process(rank, f"rank {rank} {device_type} simulated")
    for thread, number in numbers.items():
        events += name_thread(thread.rank, number, thread.name)
    return events


def _assign_threads(spans: Iterable[Span]) -> list[_Thread]:
    """The thread of each span, given in order of start: the first free one of its kind."""
    ends: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
    threads = []
    for span in spans:
        peer = span.action.peer if span.track in _WIRES else None
        key = span.rank, _TRACKS.index(span.track), -1 if peer is None else peer
        free = (number for number, end in enumerate(ends[key]) if end <= span.start_s)
        number = next(free, len(ends[key]))
        if number == len(ends[key]):
            ends[key].append(span.stop_s)
        ends[key][number] = span.stop_s
        threads.append(_Thread(*key, number))
    return threads


# -- events ------------------------------------------------------------------------------------


def _slice(span: Span, number: int, began_s: float) -> Event:
    start, stop = _to_us(span.start_s - began_s), _to_us(span.stop_s - began_s)
    event = {"ph": "X", "cat": span.track, "name": span.action.text, "pid": span.rank, "tid": number}
    return event | {"ts": start, "dur": round(stop - start, _DIGITS)}


def make_flows(slices: Iterable[tuple[int, Action, Event]], *, first_id: int = 0) -> list[Event]:
    """An arrow from each send to its receive, where both exist, from `(rank, action, event)` by time."""
    sends: defaultdict[tuple[object, ...], list[Event]] = defaultdict(list)
    receives: defaultdict[tuple[object, ...], list[Event]] = defaultdict(list)
    for rank, action, event in slices:
        if action.kind in SENDS:
            sends[_identify(rank, action)].append(event)
        elif action.kind in RECEIVES:
            receives[_identify(rank, action)].append(event)
    # A trace of several steps has each transfer several times.
    pairs = [pair for key, events in sends.items() for pair in zip(events, receives[key], strict=False)]
    flows: list[Event] = []
    for number, (send, receive) in enumerate(pairs, first_id):
        arrow = {"cat": "transfer", "name": "rows", "id": number}
        ends = [{"ph": "s", "ts": send["ts"]}, {"ph": "f", "bp": "e", "ts": max(send["ts"], receive["ts"])}]
        for end, event in zip(ends, (send, receive), strict=True):
            flows.append({**arrow, **end, "pid": event["pid"], "tid": event["tid"]})
    return flows


def _identify(rank: int, action: Action) -> tuple[object, ...]:
    """What a send and its receive share: ranks, boundary and rows."""
    assert action.ministage is not None
    ranks = (rank, action.peer) if action.kind in SENDS else (action.peer, rank)
    # The ministage after the boundary.
    after = action.ministage + (action.kind in (Kind.SEND_F, Kind.RECV_B))
    return *ranks, action.kind in FORWARDS, after, action.start, action.stop


def _count(rank: int, start_s: float, num_bytes: int) -> Event:
    """Memory in use on a rank's device from then on."""
    event = {"ph": "C", "name": "device memory", "pid": rank, "tid": 0, "ts": _to_us(start_s)}
    return event | {"args": {"MiB": round(num_bytes / _MIB, _DIGITS)}}


def _to_us(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, _DIGITS)
