"""Traces of a real step, reduced to its actions, to be shown beside the simulated ones.

A run writes `rankR_trace.json.gz` for every rank (`[profiling]`, `zorselike/train/report/profiling.py`). The
actions are kept: as the host's thread ran them, and on GPUs as their streams did.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zorselike.errors import ConfigError
from zorselike.schedule.actions import NEEDED_BY, Action, parse_action
from zorselike.simulator.report.chrome_trace import Event, make_flows, name_process, name_thread

_CATEGORIES = frozenset({"user_annotation", "gpu_user_annotation"})
_ON_HOST = "user_annotation"
_FILE = re.compile(r"rank(\d+)_trace\.json(\.gz)?")
_HINT = "give the folder of one iteration, such as outputs/RUN/profile_traces/iteration_10"
_FIRST_FLOW = 1_000_000_000
"""Above the ids of simulated arrows."""


_Threads = dict[tuple[Any, Any], int]
"""Numbers of the threads and streams of a trace that have actions, by their ids in it."""


class _Found(NamedTuple):
    """An action in a rank's trace."""

    rank: int
    action: Action
    event: Event
    """Event of the new trace; its time is set once all ranks are known."""
    start_ns: int
    """By the machine's clock, which in microseconds is too large for a float."""


def read_measured(folder: str | Path, *, first_pid: int) -> list[Event]:
    """Events of the actions of all ranks, in time since the first of them, with arrows between ranks.

    Rank `r` is process `first_pid + r`. Clocks of different nodes are assumed to agree. Raises `ConfigError`
    if there are no such traces, or one cannot be read.
    """
    files = _find_files(Path(folder))
    events: list[Event] = []
    found: list[_Found] = []
    for rank, path in files:
        trace = _read_trace(path)
        tids = _number_threads(trace)
        if not tids:
            raise ConfigError(f"{path}: contains no action of a schedule; {_HINT}")
        events += _name_tracks(trace, tids, rank, pid=first_pid + rank)
        found += _find_actions(trace, tids, rank, pid=first_pid + rank)
    began_ns = min(entry.start_ns for entry in found)
    for entry in found:
        entry.event["ts"] = (entry.start_ns - began_ns) / 1000
    events += [entry.event for entry in found]
    return events + make_flows(_list_transfers(found), first_id=_FIRST_FLOW)


def _find_files(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; {_HINT}")
    matches = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    files = sorted((int(match[1]), path) for match, path in matches if match)
    if not files:
        raise ConfigError(f"{folder}: contains no rank0_trace.json.gz; {_HINT}")
    return files


def _read_trace(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        assert isinstance(trace["traceEvents"], list)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ConfigError(f"{path}: is not a Chrome trace that can be read: {error}") from None
    return dict(trace)


def _find_actions(trace: dict[str, Any], tids: _Threads, rank: int, *, pid: int) -> list[_Found]:
    """The rank's actions by time, as events of process `pid`."""
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    found = []
    for event in trace["traceEvents"]:
        if action := _action_of(event):
            tid = tids[event["pid"], event["tid"]]
            kept = {"ph": "X", "cat": "measured", "name": action.text, "pid": pid, "tid": tid}
            kept["dur"] = event["dur"]
            found.append(_Found(rank, action, kept, base_ns + round(1000 * event["ts"])))
    return sorted(found, key=lambda entry: entry.start_ns)


def _action_of(event: Event) -> Action | None:
    if event.get("ph") != "X" or event.get("cat") not in _CATEGORIES:
        return None
    try:
        return parse_action(event.get("name", ""))
    except ValueError:
        return None


def _number_threads(trace: dict[str, Any]) -> _Threads:
    """Numbers the threads and streams that have actions, the host's thread first."""
    kept = [event for event in trace["traceEvents"] if _action_of(event) is not None]
    threads = {(event["cat"] != _ON_HOST, str(event["tid"])): (event["pid"], event["tid"]) for event in kept}
    return {threads[key]: number for number, key in enumerate(sorted(threads))}


def _name_tracks(trace: dict[str, Any], tids: _Threads, rank: int, *, pid: int) -> list[Event]:
    names = name_process(pid, f"rank {rank} measured")
    for event in trace["traceEvents"]:
        thread = event.get("pid"), event.get("tid")
        if event.get("ph") == "M" and event.get("name") == "thread_name" and thread in tids:
            names += name_thread(pid, tids[thread], event["args"]["name"])
    return names


def _list_transfers(found: Sequence[_Found]) -> Iterable[tuple[int, Action, Event]]:
    """Sends of the host's thread, and receives where they end: at the computation that waits for them, since
    a receive itself is only posted."""
    waits: defaultdict[tuple[object, ...], list[Event]] = defaultdict(list)
    num_posted: defaultdict[tuple[object, ...], int] = defaultdict(int)
    on_host = [entry for entry in found if entry.event["tid"] == 0]
    for rank, action, event, _ in on_host:
        waits[rank, action.kind, action.ministage, action.microbatch].append(event)
    for entry in on_host:
        if entry.action.kind not in NEEDED_BY:
            yield entry.rank, entry.action, entry.event
            continue
        needed_by = NEEDED_BY[entry.action.kind]
        occurrence = num_posted[entry.rank, entry.action.text]
        num_posted[entry.rank, entry.action.text] += 1
        waiting = waits[entry.rank, needed_by, entry.action.ministage, entry.action.microbatch]
        if occurrence < len(waiting):
            yield entry.rank, entry.action, waiting[occurrence]
