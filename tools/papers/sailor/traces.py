"""Sailor's traces of how many A100s a cloud gave: a list of `{"Time": seconds, "GPUs": number}`.

The files do not say their unit of time nor until when the last entry holds; here it is seconds, and a trace
ends with its last entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from zorselike.errors import ProfileError

from ..data import read_list


@dataclass(frozen=True)
class Period:
    """Between two changes."""

    start_s: float
    stop_s: float
    num_gpus: int

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s


def read_trace(path: Path) -> tuple[Period, ...]:
    """The periods of a trace, those with as many GPUs one after the other taken together; the last may have
    no length. Raises `ProfileError` for entries that are none, or whose times do not rise."""
    entries = read_list(path)
    try:
        points = [(float(entry["Time"]), int(entry["GPUs"])) for entry in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"{path}: every entry needs a Time and GPUs ({error!r})") from None
    if not points:
        raise ProfileError(f"{path}: no entries; give a trace with at least one")
    for (before, _), (after, number) in pairwise(points):
        if after <= before:
            raise ProfileError(f"{path}: Time {after:g} comes after {before:g}; times must rise")
        if number < 0:
            raise ProfileError(f"{path}: {number} GPUs at Time {after:g}; give 0 or more")
    changes = [points[0], *(b for a, b in pairwise(points) if a[1] != b[1])]
    stops = [*(time for time, _ in changes[1:]), points[-1][0]]
    return tuple(Period(start, stop, number) for (start, number), stop in zip(changes, stops, strict=True))
