"""A simulated step as a Chrome trace, which Perfetto and chrome://tracing open.

Processes are ranks and threads are what a rank has: its compute stream, its copies, its collectives, its
transfers. Events have the names that a real run's trace has (`zorselike/train/report/trace.py`): the actions'
texts. Times are microseconds, as the format wants them
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
from zorselike.schedule.actions import RECEIVES, SENDS, Action, Kind
from zorselike.simulator.result import Span, Track
from zorselike.simulator.simulated_plan import SimulatedPlan

Event = dict[str, Any]

_TRACKS: tuple[Track, ...] = get_args(Track)
_WIRES: tuple[Track, ...] = ("send", "receive")
_MICROSECONDS = 1e6
_DIGITS = 3
"""After the point of a microsecond: viewers count nanoseconds."""
_MIB = 2**20


class _Lane(NamedTuple):
    """A thread of the trace: nothing in it overlaps, for viewers drop what does."""

    rank: int
    position: int
    """Of its track among `_TRACKS`."""
    peer: int
    """Whom it sends rows to or receives them from; -1 for other things."""
    number: int
    """Among the lanes of the same."""

    @property
    def name(self) -> str:
        track = _TRACKS[self.position]
        if self.peer >= 0:
            name = f"{track} {'to' if track == 'send' else 'from'} {self.peer}"
        else:
            name = f"{track} tied weights" if track in _WIRES else track
        return name if self.number == 0 else f"{name} ({self.number + 1})"


def make_trace(case: SimulatedPlan, *, measured: Iterable[Event] = ()) -> dict[str, Any]:
    """The trace of a case that was simulated with its spans recorded. It begins with what begins first, as
    a rule the step; a rank that was done early with the step before begins earlier.

    `measured`: events of a real step (`simulator/report/measured_trace.py`), which go into the same window,
    below.
    """
    spans = sorted(case.simulation.spans, key=lambda span: (span.start_s, span.stop_s))
    memory = [(rank, case.simulation.memory_over_time(rank)) for rank in range(case.plan.num_ranks)]
    starts = [span.start_s for span in spans] + [start_s for _, own in memory for start_s, _ in own]
    began_s = min(0.0, *starts)
    lanes = _assign_lanes(spans)
    numbers = {lane: number for number, lane in enumerate(sorted(set(lanes)))}
    slices = [_slice(span, numbers[lane], began_s) for span, lane in zip(spans, lanes, strict=True)]
    events = [
        *_name_tracks(case, numbers),
        *slices,
        # A transfer through host memory has copies besides.
        *make_flows(
            (span.rank, span.action, event)
            for span, event in zip(spans, slices, strict=True)
            if span.track in _WIRES
        ),
        *(_count(rank, start_s - began_s, size) for rank, own in memory for start_s, size in own),
        *measured,
    ]
    # Names first, then by time: some readers of the format want that.
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(trace: Mapping[str, Any], path: str | Path) -> None:
    """Writes a trace as JSON, gzipped where the name ends in `.gz`; raises `ConfigError` where it cannot."""
    target = Path(path)
    data = json.dumps(trace, separators=(",", ":")).encode()
    try:
        target.write_bytes(gzip.compress(data, compresslevel=5) if target.suffix == ".gz" else data)
    except OSError as error:
        raise ConfigError(f"{path}: the trace cannot be written: {error.strerror}") from None


# -- tracks ------------------------------------------------------------------------------------


def name_process(pid: int, name: str) -> list[Event]:
    """A process's name; processes are ordered by their numbers."""
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
    ]


def name_thread(pid: int, tid: int, name: str) -> list[Event]:
    """A thread's name; threads are ordered by their numbers."""
    return [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}},
    ]


def _name_tracks(case: SimulatedPlan, numbers: Mapping[_Lane, int]) -> list[Event]:
    events = []
    for rank, device_type in enumerate(case.device_types):
        events += name_process(rank, f"rank {rank} {device_type} simulated")
    for lane, number in numbers.items():
        events += name_thread(lane.rank, number, lane.name)
    return events


def _assign_lanes(spans: Iterable[Span]) -> list[_Lane]:
    """The lane of each span, of spans by their start: the first of its kind that is free."""
    ends: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
    lanes = []
    for span in spans:
        peer = span.action.peer if span.track in _WIRES else None
        key = span.rank, _TRACKS.index(span.track), -1 if peer is None else peer
        free = (number for number, end in enumerate(ends[key]) if end <= span.start_s)
        number = next(free, len(ends[key]))
        if number == len(ends[key]):
            ends[key].append(span.stop_s)
        ends[key][number] = span.stop_s
        lanes.append(_Lane(*key, number))
    return lanes


# -- events ------------------------------------------------------------------------------------


def _slice(span: Span, number: int, began_s: float) -> Event:
    start, stop = _to_us(span.start_s - began_s), _to_us(span.stop_s - began_s)
    return {
        "ph": "X",
        "cat": span.track,
        "name": span.action.text,
        "pid": span.rank,
        "tid": number,
        "ts": start,
        "dur": round(stop - start, _DIGITS),
    }


def make_flows(slices: Iterable[tuple[int, Action, Event]], *, first_id: int = 0) -> list[Event]:
    """An arrow from each send to its receive, of `(rank, action, event)` by time, where both are there."""
    sends: defaultdict[tuple[object, ...], list[Event]] = defaultdict(list)
    receives: defaultdict[tuple[object, ...], list[Event]] = defaultdict(list)
    for rank, action, event in slices:
        if action.kind in SENDS:
            sends[_identify(rank, action)].append(event)
        elif action.kind in RECEIVES:
            receives[_identify(rank, action)].append(event)
    # A trace of several steps has each transfer several times.
    pairs = [pair for key, own in sends.items() for pair in zip(own, receives[key], strict=False)]
    flows: list[Event] = []
    for number, (send, receive) in enumerate(pairs, first_id):
        arrow = {"cat": "transfer", "name": "rows", "id": number}
        ends = [{"ph": "s", "ts": send["ts"]}, {"ph": "f", "bp": "e", "ts": max(send["ts"], receive["ts"])}]
        for end, event in zip(ends, (send, receive), strict=True):
            flows.append({**arrow, **end, "pid": event["pid"], "tid": event["tid"]})
    return flows


def _identify(rank: int, action: Action) -> tuple[object, ...]:
    """What a send and its receive have in common: the ranks, the boundary, the rows."""
    assert action.ministage is not None
    ranks = (rank, action.peer) if action.kind in SENDS else (action.peer, rank)
    # The number of the ministage above the boundary.
    above = action.ministage + (action.kind in (Kind.SEND_F, Kind.RECV_B))
    is_forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
    return *ranks, is_forward, above, action.start, action.stop


def _count(rank: int, start_s: float, num_bytes: int) -> Event:
    """What a rank's device holds from then on."""
    event = {"ph": "C", "name": "device memory", "pid": rank, "tid": 0, "ts": _to_us(start_s)}
    return event | {"args": {"MiB": round(num_bytes / _MIB, _DIGITS)}}


def _to_us(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, _DIGITS)
