"""What each kind of action costs the host beside layers and wires: read off steps of the real runtime.

Steps with few and with many FSDP units in a ministage tell what an action costs by itself, and what each
unit adds.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from zorselike.profiler.clock import trimmed_mean
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.schedule.actions import COMPUTE, Action, Kind

FEW_UNITS, MANY_UNITS = 1, 3
"""In a ministage, of the two runs between which a line is drawn."""

IN_GROUP = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)

Seconds = Mapping[Kind, float]


@dataclass(frozen=True, slots=True)
class ActionTime:
    """One action as it ran, in monotonic seconds."""

    action: Action
    begin_s: float
    end_s: float
    cpu_s: float
    """Of the thread that ran it, since the action before it ended."""


@dataclass
class ActionClock:
    """Collects them while `running`."""

    times: list[ActionTime] = field(default_factory=list)

    @contextmanager
    def running(self, pipe: HeteroPipeline) -> Iterator[None]:
        """Inside, the actions of this rank's steps are timed."""
        begin_s, cpu_begin_s = 0.0, time.thread_time()

        def enter(_: Action) -> None:
            nonlocal begin_s
            begin_s = time.monotonic()

        def leave(action: Action) -> None:
            nonlocal cpu_begin_s
            cpu_end_s = time.thread_time()
            self.times.append(ActionTime(action, begin_s, time.monotonic(), cpu_end_s - cpu_begin_s))
            cpu_begin_s = cpu_end_s

        with pipe.watching(enter, leave):
            yield


@dataclass(frozen=True)
class ActionCosts:
    """Host seconds by kind of action."""

    action_s: Mapping[str, float]
    unit_s: Mapping[str, float]
    """More for each unit."""


@dataclass
class ActionSamples:
    """Seconds of all actions that were seen, by kind."""

    is_cpu: bool
    """Whether ranks compute by themselves. Then it is the thread's own time that counts, so that waiting is
    not in it. With a device it is the time until a call returned, since backwards run in a thread of their
    own; what waits for the device does not count."""
    seconds: defaultdict[Kind, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add_step(self, times: Iterable[ActionTime]) -> None:
        """The actions of one rank's step.

        The first computation after a gather copies the parameters out: what it takes longer than those after
        it is the gather's.
        """
        found: defaultdict[tuple[Kind, int | None], list[float]] = defaultdict(list)
        for each in times:
            kind = each.action.kind
            if self.is_cpu or kind is not Kind.NORM:
                found[kind, each.action.ministage].append(self.find_seconds(each))
        for (kind, ministage), gathers in found.items():
            if kind is Kind.UNSHARD:
                for turn, pass_ in enumerate((Kind.F, Kind.B)):
                    first, *others = found.get((pass_, ministage), [0.0])
                    if others and turn < len(gathers):
                        usual = statistics.median(others)
                        gathers[turn] += first - usual
                        found[pass_, ministage][0] = usual
        for (kind, _), own in found.items():
            self.seconds[kind] += own

    def find_seconds(self, each: ActionTime) -> float:
        """Of one action."""
        return each.cpu_s if self.is_cpu else each.end_s - each.begin_s

    def means(self) -> Seconds:
        """Of each kind that was seen."""
        return {kind: trimmed_mean(seconds) for kind, seconds in self.seconds.items()}


def draw_lines(few: Seconds, many: Seconds) -> ActionCosts:
    """From means with `FEW_UNITS` and `MANY_UNITS` units in a ministage; nothing is below 0."""
    action_s, unit_s = {}, {}
    for kind in sorted(few.keys() & many.keys()):
        slope = max(0.0, (many[kind] - few[kind]) / (MANY_UNITS - FEW_UNITS))
        unit_s[kind.value] = slope
        action_s[kind.value] = max(0.0, few[kind] - FEW_UNITS * slope)
    return ActionCosts(action_s, unit_s)


def find_shared(own: ActionCosts, zero2: ActionCosts, zero3: ActionCosts) -> dict[str, float]:
    """What a unit costs more in a group of several ranks than in one of its own; of computations, what ZeRO 3
    costs more than ZeRO 2, since they gather and reduce by themselves."""
    more = {
        **{kind.value: zero2.unit_s[kind] - own.unit_s[kind] for kind in IN_GROUP},
        **{kind.value: zero3.unit_s[kind] - zero2.unit_s[kind] for kind in sorted(COMPUTE)},
    }
    return {kind: seconds for kind, seconds in more.items() if seconds > 0}
