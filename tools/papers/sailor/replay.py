"""A job along a trace of availability: what is planned at every change, and what that comes to.

Sailor's traces say how many A100s a cloud gave: a list of `{"Time": seconds, "GPUs": number}`. The files name
neither their unit of time nor until when the last entry holds; here it is seconds, and a trace ends with its
last entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from zorselike.errors import ConfigError, PlanError, ProfileError
from zorselike.planner.pipelines.allocation import AllocationGoal

from ..data import read_list
from .arithmetic import SailorArithmetic
from .cases import GLOBAL_BATCH, ZONES
from .pipelines import Quotas
from .planning import Planned, lay_even_mesh, search_quotas

Policy = Literal["ours", "cheaper", "A100 alone", "V100 alone", "even mesh", "never replanned"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
EXPLAINED: Mapping[Policy, str] = {
    "ours": "our search, all there is, the fastest",
    "cheaper": "our search, the cheapest that has 90 % of that throughput",
    "A100 alone": "our search on the A100s",
    "V100 alone": "our search on the V100s",
    "never replanned": "our plan for the fewest A100s that the trace ever has, all the time",
    "even mesh": "stages of as many layers, replicas and GPUs each, the fastest of all such, A100s first",
}
ENOUGH = 0.9
"""Share of the most throughput that the cheaper plan must reach."""
A100, V100 = "A100-40", "V100-16"


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


@dataclass(frozen=True)
class Event:
    """One change of availability, and what each policy does; None: nothing fits."""

    period: Period
    planned: Mapping[Policy, Planned | None]


@dataclass(frozen=True)
class Total:
    """What a policy comes to along a trace."""

    policy: Policy
    iterations: float
    dollars: float
    plan_s: tuple[float, ...]
    """Seconds of each search."""
    seconds: float
    num_changes: int
    """Changes of the plan."""

    @property
    def throughput(self) -> float:
        return self.iterations / self.seconds if self.seconds else 0.0

    @property
    def dollars_per_iteration(self) -> float:
        return self.dollars / self.iterations if self.iterations else 0.0


@dataclass(frozen=True)
class Replay:
    """A job along a trace."""

    name: str
    num_v100: int
    """V100s that are there all the time: an assumption, the traces have A100s only."""
    events: tuple[Event, ...]

    @property
    def policies(self) -> tuple[Policy, ...]:
        return tuple(policy for policy in POLICIES if policy in self.events[0].planned)

    def add_up(self, policy: Policy, pause_s: float = 0.0) -> Total:
        """Sums up a policy; `pause_s` seconds after each change of plan are lost and paid for."""
        iterations, dollars, changes = 0.0, 0.0, 0
        before: Planned | None = None
        for event in self.events:
            planned, seconds = event.planned[policy], event.period.seconds
            if planned is not None:
                is_new = before is not None and planned.plan != before.plan
                changes += is_new
                running_s = max(0.0, seconds - pause_s) if is_new else seconds
                iterations += running_s * planned.figures.throughput
                # Rent goes on while nothing is computed, egress does not.
                dollars += seconds * planned.figures.rent * planned.figures.throughput
                dollars += running_s * planned.figures.egress * planned.figures.throughput
            before = planned
        plan_s = tuple(p.search_s for event in self.events if (p := event.planned[policy]) is not None)
        seconds = self.events[-1].period.stop_s - self.events[0].period.start_s
        return Total(policy, iterations, dollars, plan_s or (0.0,), seconds, changes)

    def break_even_s(self) -> float | None:
        """How long each change of our plan may take until never planning anew has made as many iterations;
        None where that is longer than the trace."""
        never = self.add_up("never replanned").iterations
        low, high = 0.0, self.events[-1].period.stop_s - self.events[0].period.start_s
        if self.add_up("ours", high).iterations >= never:
            return None
        while high - low > 0.1:
            middle = (low + high) / 2
            low, high = (middle, high) if self.add_up("ours", middle).iterations > never else (low, middle)
        return low


def replay(name: str, trace: Sequence[Period], arithmetic: SailorArithmetic, *, num_v100: int = 0) -> Replay:
    """Plans at every change.

    Raises:
        ConfigError: The trace has no GPUs at some time, and there are no others.
    """
    fewest = min(period.num_gpus for period in trace)
    if fewest + num_v100 < 1:
        raise ConfigError(f"{name}: no GPUs at some time; keep some V100s beside them")
    kept = _search(arithmetic, _quotas(fewest, num_v100))
    return Replay(
        name,
        num_v100,
        tuple(
            Event(period, _plan(arithmetic, period.num_gpus, num_v100) | {"never replanned": kept})
            for period in trace
        ),
    )


def _quotas(num_a100: int, num_v100: int) -> Quotas:
    counts = {A100: num_a100, V100: num_v100}
    return Quotas({(gpu, ZONES[0]): number for gpu, number in counts.items() if number})


def _plan(arithmetic: SailorArithmetic, num_a100: int, num_v100: int) -> dict[Policy, Planned | None]:
    quotas = _quotas(num_a100, num_v100)
    ours = _search(arithmetic, quotas)
    planned: dict[Policy, Planned | None] = {"ours": ours, "cheaper": None}
    if ours is not None:
        planned["cheaper"] = _search(
            arithmetic, quotas, objective="cost", min_throughput=ENOUGH * ours.figures.throughput
        )
    if num_v100:
        planned["A100 alone"] = _search(arithmetic, _quotas(num_a100, 0)) if num_a100 else None
        planned["V100 alone"] = _search(arithmetic, _quotas(0, num_v100))
    planned["even mesh"] = lay_even_mesh(arithmetic, quotas, GLOBAL_BATCH)
    return planned


def _search(arithmetic: SailorArithmetic, quotas: Quotas, **goal: Any) -> Planned | None:
    try:
        return search_quotas(arithmetic, quotas, AllocationGoal(bill_idle=False, **goal), GLOBAL_BATCH)
    except PlanError:
        return None
