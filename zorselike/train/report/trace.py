"""Names the processes, the thread of actions, and the GPU streams of one rank's Chrome trace.

CUPTI numbers streams in its own way, and torch does not say which of its streams has which number. But the
trace tells which host call launched each piece of a stream's work, and during which action; so a stream is
named after the actions that it works for, with `i` for ministages and `m` for microbatches:
`stream 24: iLOADm`.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zorselike.schedule.actions import parse_action

Event = dict[str, Any]

_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
_LEAST_SHARE = 0.1
"""Least share of a stream's work that puts an action into its name."""


def write_readable(raw: Path, target: Path, *, rank: int) -> None:
    """Names the tracks of a Chrome trace and writes it gzipped, for Perfetto and chrome://tracing."""
    trace = json.loads(raw.read_text(encoding="utf-8"))
    name_tracks(trace["traceEvents"], rank=rank)
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write(json.dumps(trace, separators=(",", ":")))  # `dump` would encode in Python.


def name_tracks(events: Sequence[Event], *, rank: int) -> None:
    """Changes a trace's metadata events in place."""
    actions = find_actions(events)
    action_threads = {(event["pid"], event["tid"]) for event, _ in actions}
    streams = name_streams(events, actions)
    labels = {e["pid"]: e["args"]["labels"] for e in events if e.get("name") == "process_labels"}
    for event in events:
        if event.get("ph") != "M":
            continue
        track = event["pid"], event["tid"]
        if event["name"] == "process_name":
            event["args"]["name"] = " ".join(filter(None, (f"rank {rank}", labels.get(event["pid"]))))
        elif event["name"] == "thread_name" and track in action_threads:
            event["args"]["name"] = "actions"
        elif event["name"] == "thread_name" and track in streams:
            event["args"]["name"] = streams[track]


def find_actions(events: Iterable[Event]) -> list[tuple[Event, str]]:
    """Events that are actions of the schedule, by time, with their names without numbers."""
    found = []
    for event in events:
        if event.get("cat") == "user_annotation" and (kind := _strip_numbers(event["name"])):
            found.append((event, kind))
    return sorted(found, key=lambda entry: float(entry[0]["ts"]))


def name_streams(
    events: Iterable[Event], actions: Sequence[tuple[Event, str]]
) -> Mapping[tuple[Any, Any], str]:
    """A name for each `(device, stream)`, from the actions whose calls launched most of its work."""
    begins = [float(event["ts"]) for event, _ in actions]
    action_of: dict[int, str] = {}
    on_gpu = []
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if correlation is None:
            continue
        if event.get("cat") in _ON_GPU:
            on_gpu.append((event, correlation))
        elif event.get("cat") in _CALLS:
            position = bisect_right(begins, float(event["ts"])) - 1
            if position >= 0 and _lasts_until(actions[position][0], event):
                action_of[correlation] = actions[position][1]
    work: defaultdict[tuple[Any, Any], Counter[str]] = defaultdict(Counter)
    for event, correlation in on_gpu:
        kind = action_of.get(correlation)
        if kind is not None:
            work[event["pid"], event["tid"]][kind] += event["dur"]
    return {(device, stream): f"stream {stream}: {_list(kinds)}" for (device, stream), kinds in work.items()}


def _lasts_until(action: Event, call: Event) -> bool:
    return float(call["ts"]) <= float(action["ts"]) + float(action["dur"])


def _list(kinds: Counter[str]) -> str:
    least = _LEAST_SHARE * kinds.total()
    return " ".join(kind for kind, duration in kinds.most_common() if duration >= least)


def _strip_numbers(text: str) -> str | None:
    """`iFm` for `3F0`; None for other names."""
    try:
        action = parse_action(text)
    except ValueError:
        return None
    ministage = "" if action.ministage is None else "i"
    microbatch = "" if action.microbatch is None else "m"
    return f"{ministage}{action.kind.value}{microbatch}"
