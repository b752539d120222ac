"""How much of the copying between host and device the computing hides, from a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]
"""Begin and end, in any one unit."""
_COPIES = ("gpu_memcpy", "gpu_memset")


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

    @property
    def share(self) -> float:
        """Exposed copies of the time of a step."""
        return self.exposed_ms / self.step_ms if self.step_ms else 0.0


def cover(intervals: Iterable[Interval], window: Interval) -> float:
    """How long any of some intervals runs within a window."""
    covered, reached = 0.0, window[0]
    for begin, end in sorted(intervals):
        first, last = max(begin, reached), min(end, window[1])
        if first < last:
            covered, reached = covered + last - first, last
    return covered


def find_exposure(events: Sequence[dict[str, Any]], num_steps: int) -> Exposure | None:
    """The exposure in events of a Chrome trace (times in µs) over `num_steps` steps; None if the trace holds
    no kernels. What is copied after the last kernel would run beside the next step, so it does
    not count."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [_interval(e) for e in timed if e.get("cat") == "kernel"]
    inside = [_interval(e) for e in timed if e.get("cat") in _COPIES and _direction(e) is None]
    copies = [e for e in timed if e.get("cat") in _COPIES and _direction(e) is not None]
    if not kernels:
        return None
    window = (min(begin for begin, _ in kernels), max(end for _, end in kernels))
    copying, computing = list(map(_interval, copies)), kernels + inside
    compute, either = cover(computing, window), cover(computing + copying, window)
    length, per_step_ms = window[1] - window[0], 1 / (1e3 * num_steps)
    num_bytes = {
        way: sum(float(e.get("args", {}).get("bytes", 0)) for e in copies if _direction(e) == way) / num_steps
        for way in ("HtoD", "DtoH")
    }
    return Exposure(
        step_ms=length * per_step_ms,
        compute_ms=compute * per_step_ms,
        copy_ms=cover(copying, window) * per_step_ms,
        exposed_ms=(either - compute) * per_step_ms,
        idle_ms=(length - either) * per_step_ms,
        to_device_bytes=num_bytes["HtoD"],
        to_host_bytes=num_bytes["DtoH"],
    )


def _direction(event: dict[str, Any]) -> str | None:
    """`HtoD` or `DtoH`; None inside the device."""
    return next((way for way in ("HtoD", "DtoH") if way in event["name"]), None)


def _interval(event: dict[str, Any]) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])
