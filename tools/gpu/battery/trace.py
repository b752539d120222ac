"""What a trace of a step says: how much of the copies computing hides, and in which order actions ran."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from zorselike.schedule.actions import COMPUTE, HOST_COPIES, Kind, parse_action

Event = dict[str, Any]
Interval = tuple[float, float]

_MOST_TRIES = 3
"""Of a trace: now and then, under load, torch's profiler returns one without events."""
_ON_DEVICE = "on the device"
TRACE = "rank0_trace.json"
"""As `zorselike simulate --measured` looks for it."""


def record_step(step: Callable[[], object], folder: Path, kind: str) -> list[Event]:
    """The events of a step of a process by itself; the trace stays in the folder."""
    folder.mkdir(exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (kind == "cuda")
    for _ in range(_MOST_TRIES):
        with profile(activities=activities) as profiler:
            step()
            if kind == "cuda":
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(folder / TRACE))
        events: list[Event] = json.loads((folder / TRACE).read_text(encoding="utf-8"))["traceEvents"]
        if any(event.get("cat") == "user_annotation" for event in events):
            break
    return events


@dataclass(frozen=True)
class Exposure:
    """Seconds of a traced step."""

    step_s: float
    compute_s: float
    """In which a kernel ran."""
    copies: Mapping[str, tuple[float, float]]
    """By direction: in which a copy ran, and of these in which no kernel did."""

    @property
    def exposed_s(self) -> float:
        return sum(exposed for _, exposed in self.copies.values())

    def describe(self) -> str:
        copies = "; ".join(
            f"{name} {1e3 * all_s:.1f} ms, of which {1e3 * exposed_s:.1f} ms hidden by nothing"
            for name, (all_s, exposed_s) in self.copies.items()
        )
        idle_s = self.step_s - self.compute_s
        step = f"of {1e3 * self.step_s:.1f} ms kernels ran in all but {1e3 * idle_s:.1f} ms"
        return f"{step}; {copies or 'no copies'}"


def find_exposure(events: Iterable[Event], *, on_gpu: bool) -> Exposure:
    """From kernels and copies of a GPU; on a CPU from the host's actions, of which none hides another."""
    kernels: list[Interval] = []
    copies: dict[str, list[Interval]] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        interval = interval_of(event)
        if on_gpu and is_kernel(event):
            kernels.append(interval)
        elif on_gpu and event.get("cat") == "gpu_memcpy":
            copies.setdefault(direction_of(event), []).append(interval)
        elif not on_gpu and event.get("cat") == "user_annotation":
            kind = _kind_of(event["name"])
            if kind in COMPUTE:
                kernels.append(interval)
            elif kind in HOST_COPIES:
                copies.setdefault("copies", []).append(interval)
    computing = unite(kernels)
    everything = unite([*kernels, *(each for own in copies.values() for each in own)])
    return Exposure(
        step_s=everything[-1][1] - everything[0][0] if everything else 0.0,
        compute_s=length(computing),
        copies={
            name: (length(united := unite(own)), length(united) - common(united, computing))
            for name, own in sorted(copies.items())
            if name != _ON_DEVICE
        },
    )


def interval_of(event: Event) -> Interval:
    """When it ran, in seconds."""
    start = float(event["ts"])
    return start / 1e6, (start + float(event["dur"])) / 1e6


def is_kernel(event: Event) -> bool:
    """Whether it computes on a GPU."""
    return event.get("cat") == "kernel" and not event["name"].startswith("nccl")


def direction_of(copy: Event) -> str:
    """Of a copy by the GPU."""
    return next((way for way in ("HtoD", "DtoH") if way in copy["name"]), _ON_DEVICE)


def _kind_of(name: str) -> Kind | None:
    try:
        return parse_action(name).kind
    except ValueError:
        return None


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not overlap, by time."""
    united: list[Interval] = []
    for start, stop in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], stop)
        else:
            united.append((start, stop))
    return united


def length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def common(ones: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Time in both of two lists of intervals as `unite` gives them."""
    total, i, j = 0.0, 0, 0
    while i < len(ones) and j < len(others):
        total += max(0.0, min(ones[i][1], others[j][1]) - max(ones[i][0], others[j][0]))
        if ones[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total


# -- order ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """How the order of actions on the device agrees with the simulated one."""

    num_compared: int
    agreement: float
    """Share of the pairs that are clearly one after the other when simulated, and were so in fact."""
    first_inversion: str
    """Empty if there is none."""


def number_starts(starts: Iterable[tuple[str, float]], times: Mapping[str, int]) -> dict[str, float]:
    """When each action began, from the starts of its pieces (on several streams, say); one that a step has
    several times, as `times` says, is numbered. What cannot be told apart is left out."""
    pieces: dict[str, list[float]] = {}
    for name, start in starts:
        pieces.setdefault(name, []).append(start)
    found: dict[str, float] = {}
    for name, own in pieces.items():
        number = times.get(name, 0)
        if not number or len(own) % number:
            continue
        own.sort()
        for turn, start in enumerate(own[:: len(own) // number]):
            found[f"{name} ({turn + 1})" if number > 1 else name] = start
    return found


def compare_orders(
    simulated: Mapping[str, float], found: Mapping[str, float], *, tolerance_s: float
) -> Order:
    """Starts of actions, by their texts, in seconds of one step each; differences up to `tolerance_s` are no
    order."""
    names = sorted(simulated.keys() & found.keys(), key=lambda name: simulated[name])
    clear = inverted = 0
    first = ""
    for one, other in combinations(names, 2):
        if simulated[other] - simulated[one] <= tolerance_s:
            continue
        clear += 1
        if found[one] - found[other] > tolerance_s:
            inverted += 1
            first = first or (
                f"{one} before {other} when simulated ({1e3 * simulated[one]:.2f} and "
                f"{1e3 * simulated[other]:.2f} ms), after it in fact ({1e3 * found[one]:.2f} and "
                f"{1e3 * found[other]:.2f} ms)"
            )
    return Order(len(names), 1 - inverted / clear if clear else 1.0, first)
