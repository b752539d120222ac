"""Why a GPU computed nothing for a while: its streams waited, or the host was late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zorselike.text.wording import count

from .trace import Event, Interval, common, direction_of, interval_of, is_kernel, unite

_LEAST_S = 20e-6
"""Shorter ones are between any two kernels."""
_LONG_S = 1e-3
"""In these it is looked what the host did."""
_HOST = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Gap:
    """Time of a step in which no kernel ran."""

    start_s: float
    """After the step's first kernel."""
    length_s: float
    ended_by: str
    """The kernel after it."""
    action: str
    """What the host did when it launched that kernel; empty if not known."""
    launched_s: float | None
    """When it was launched, counted from the gap's start: before that, a stream waited."""
    copies: tuple[tuple[str, float], ...]
    """For how long copies ran meanwhile, by direction."""
    host_call: tuple[str, float]
    """In which call of CUDA's the host was for the longest time meanwhile, and how long."""

    @property
    def host_late_s(self) -> float:
        """For how long the kernel that ended it was not launched yet."""
        return min(max(self.launched_s or 0.0, 0.0), self.length_s)

    def describe(self) -> str:
        """One line."""
        copies = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in self.copies) or "no copies"
        reason = "not known when launched"
        if self.launched_s is not None:
            when = f"launched {1e3 * abs(self.launched_s):.1f} ms"
            reason = f"{when} before it began: its stream waited"
            if self.launched_s > 0:
                name, seconds = self.host_call
                reason = f"{when} after it began: the host was late ({1e3 * seconds:.1f} ms in {name})"
        return (
            f"at {1e3 * self.start_s:.1f} ms for {1e3 * self.length_s:.1f} ms, until {self.action or '?'} "
            f"({self.ended_by[:40]}), {reason}; {copies}"
        )


def find_gaps(events: Iterable[Event]) -> list[Gap]:
    """All of a traced step on a GPU, by time."""
    events = [event for event in events if event.get("ph") == "X"]
    kernels = sorted(filter(is_kernel, events), key=lambda event: float(event["ts"]))
    calls = [event for event in events if event.get("cat") in _HOST]
    launches = {
        number: event for event in calls if (number := event.get("args", {}).get("correlation")) is not None
    }
    copies: dict[str, list[Interval]] = {}
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            copies.setdefault(direction_of(event), []).append(interval_of(event))
    copying = {name: unite(own) for name, own in sorted(copies.items())}
    actions = [event for event in events if event.get("cat") == "user_annotation"]
    found = []
    for gap, kernel in _between(kernels):
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        meanwhile = [(name, common(own, [gap])) for name, own in copying.items()]
        found.append(
            Gap(
                start_s=gap[0] - interval_of(kernels[0])[0],
                length_s=gap[1] - gap[0],
                ended_by=kernel["name"],
                action=_innermost(actions, launch) if launch is not None else "",
                launched_s=None if launch is None else interval_of(launch)[0] - gap[0],
                copies=tuple((name, seconds) for name, seconds in meanwhile if seconds),
                host_call=_longest(calls, gap) if gap[1] - gap[0] > _LONG_S else ("no call", 0.0),
            )
        )
    return found


def describe_gaps(gaps: Sequence[Gap], *, most: int = 10) -> Iterator[str]:
    """How much of them is whose, and the longest ones, a line each."""
    total, late = sum(gap.length_s for gap in gaps), sum(gap.host_late_s for gap in gaps)
    yield (
        f"without kernels: {1e3 * total:.1f} ms in {count(len(gaps), 'gap')}, of which the host was late "
        f"{1e3 * late:.1f} ms"
    )
    longest = sorted(gaps, key=lambda gap: -gap.length_s)[:most]
    yield from (gap.describe() for gap in sorted(longest, key=lambda gap: gap.start_s))


def _between(kernels: Sequence[Event]) -> Iterator[tuple[Interval, Event]]:
    """Times between kernels, each with the one that ends it."""
    end = interval_of(kernels[0])[1] if kernels else 0.0
    for kernel in kernels:
        start, stop = interval_of(kernel)
        if start - end > _LEAST_S:
            yield (end, start), kernel
        end = max(end, stop)


def _innermost(actions: Iterable[Event], launch: Event) -> str:
    """The name of the shortest annotation of the launching thread around a launch."""
    start, _ = interval_of(launch)
    around = [
        (stop - begin, action["name"])
        for action in actions
        for begin, stop in (interval_of(action),)
        if begin <= start <= stop and action.get("tid") == launch.get("tid")
    ]
    return str(min(around)[1]) if around else ""


def _longest(calls: Iterable[Event], gap: Interval) -> tuple[str, float]:
    inside = [(common([interval_of(call)], [gap]), call["name"]) for call in calls]
    seconds, name = max(inside, default=(0.0, ""))
    return (str(name), seconds) if seconds else ("no call", 0.0)
