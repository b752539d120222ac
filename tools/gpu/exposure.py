"""How much of the copying between host and device the computing hides, from a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Interval = tuple[float, float]
"""Begin and end, in any one unit."""


@dataclass(frozen=True)
class Exposure:
    """What a device did between the first and the last kernel of some steps, in ms a step."""

    step_ms: float
    compute_ms: float
    """A kernel ran, or a copy inside the device."""
    copy_ms: float
    """A copy from or to the host ran."""
    exposed_ms: float
    """A copy from or to the host ran and nothing computed."""
    idle_ms: float
    """Neither ran."""
    to_device_bytes: float
    to_host_bytes: float
    longest_ms: tuple[Interval, ...] = ()
    """The longest stretches of exposed copies of all steps: when after the first kernel, and how long."""

    @property
    def share(self) -> float:
        """Exposed copies of the time of a step."""
        return self.exposed_ms / self.step_ms if self.step_ms else 0.0


def sweep(
    compute: Iterable[Interval], copies: Iterable[Interval], window: Interval
) -> tuple[list[float], list[Interval]]:
    """How long something computes, something is copied, and neither, within a window; and the stretches in
    which something is copied and nothing computes."""
    before, stop = window
    edges: list[tuple[float, int, int]] = [(stop, 0, 0)]
    for kind, intervals in enumerate((compute, copies)):
        for begin, end in intervals:
            first, last = max(begin, before), min(end, stop)
            edges += [(first, kind, 1), (last, kind, -1)] if first < last else []
    running, seconds = [0, 0], [0.0, 0.0, 0.0]
    exposed: list[Interval] = []
    for at, kind, step in sorted(edges):
        if at > before:
            for i, is_on in enumerate((running[0], running[1], not any(running))):
                seconds[i] += (at - before) * bool(is_on)
            if running[1] and not running[0]:
                begin = exposed.pop()[0] if exposed and exposed[-1][1] == before else before
                exposed.append((begin, at))
            before = at
        running[kind] += step
    return seconds, exposed


def find_exposure(events: Sequence[dict[str, Any]], num_steps: int) -> Exposure | None:
    """The exposure in events of a Chrome trace (times in µs) over `num_steps` steps; None if the trace holds
    no kernels. What is copied after the last kernel would run beside the next step, so it does
    not count."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [_interval(e) for e in timed if e.get("cat") == "kernel"]
    inside = [_interval(e) for e in timed if e.get("cat") in _COPIES and _direction(e) is None]
    copies = [(e, _interval(e)) for e in timed if e.get("cat") in _COPIES and _direction(e) is not None]
    if not kernels:
        return None
    window = (min(begin for begin, _ in kernels), max(end for _, end in kernels))
    (compute, copying, idle), exposed = sweep(kernels + inside, (own for _, own in copies), window)
    longest = sorted(exposed, key=lambda interval: interval[0] - interval[1])[:_NUM_LONGEST]
    per_step_ms = 1 / (1e3 * num_steps)
    return Exposure(
        step_ms=(window[1] - window[0]) * per_step_ms,
        compute_ms=compute * per_step_ms,
        copy_ms=copying * per_step_ms,
        exposed_ms=sum(end - begin for begin, end in exposed) * per_step_ms,
        idle_ms=idle * per_step_ms,
        to_device_bytes=_bytes(copies, "HtoD") / num_steps,
        to_host_bytes=_bytes(copies, "DtoH") / num_steps,
        longest_ms=tuple(((a - window[0]) / 1e3, (b - a) / 1e3) for a, b in longest),
    )


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace."""
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


_NUM_LONGEST = 8
_COPIES = ("gpu_memcpy", "gpu_memset")


def _direction(event: dict[str, Any]) -> str | None:
    """`HtoD` or `DtoH`; None inside the device."""
    return next((way for way in ("HtoD", "DtoH") if way in event["name"]), None)


def _interval(event: dict[str, Any]) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _bytes(copies: Iterable[tuple[dict[str, Any], Interval]], way: str) -> float:
    return sum(float(e.get("args", {}).get("bytes", 0)) for e, _ in copies if _direction(e) == way)
