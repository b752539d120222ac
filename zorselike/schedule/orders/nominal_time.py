"""Groups side by side in nominal time: what each computes next where microbatches in flight are bounded.

`in_flight.py` has the rules and why they are so. Here nothing is known of plans and rows, so that the
planner orders candidates that have none yet (`planner/estimate/rounds.py`) by the same code. A search orders
thousands of them, of thousands of computations each: so what was refused is not asked for again in vain.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class Needs(NamedTuple):
    """Between two neighbouring groups, per microbatch of one, the last of the other that it waits for."""

    forward: list[int]
    """Per microbatch of the later group, one of the earlier."""
    backward: list[int]
    """Per microbatch of the earlier group, one of the later."""


@dataclass(frozen=True)
class StageNeeds:
    """Who waits for whom among all ministages."""

    between: list[Needs]
    """Of each ministage and the one after it."""
    ahead: list[list[int]]
    """Per ministage and microbatch of the last ministage, the last of its own that goes forward before it."""
    behind: list[list[int]]
    """Likewise how many of its own can go backward before that one does, and with it the last entry: all."""

    @classmethod
    def among(
        cls, owners: Sequence[int], num_last: int, find_needs: Callable[[int, int], Needs]
    ) -> StageNeeds:
        """Of ministages with these groups, the last of which has so many microbatches."""
        found: dict[tuple[int, int], Needs] = {}
        for a, b in pairwise(owners):
            if (a, b) not in found:
                found[a, b] = find_needs(a, b)
        between = [found[pair] for pair in pairwise(owners)]
        ahead, waits = [list(range(num_last))], [list(range(num_last))]
        for needs in reversed(between):
            ahead.append([needs.forward[m] for m in ahead[-1]])
            waits.append([waits[-1][m] for m in needs.backward])
        behind = [[bisect_left(own, last) for last in range(num_last + 1)] for own in reversed(waits)]
        return cls(between, ahead[::-1], behind)

    def find_least(self, owned: Sequence[Sequence[int]], lowest_backward: int) -> tuple[int, ...]:
        """Per group, whose ministages are `owned`, the least bound with which a step ends."""
        found = []
        for ministages in owned:
            own = [i for i in ministages if i >= lowest_backward]
            held = (
                sum(self.ahead[i][last] + 1 - self.behind[i][last] for i in own)
                for last in range(len(self.ahead[-1]))
            )
            found.append(max(1, *held))
        return tuple(found)


class Computation(NamedTuple):
    """One microbatch through one ministage."""

    ministage: int
    is_forward: bool
    microbatch: int


@dataclass
class Stage:
    """A ministage in nominal time. Of each pair the first is of backwards."""

    group: int
    times: tuple[Sequence[int], Sequence[int]]
    """Per microbatch; integers, as ties between start times are broken by rule. Of backwards none if the
    ministage only goes forward."""
    delay: int = 0
    """What is sent to it takes so long."""
    needs: list[Sequence[int] | None] = field(default_factory=lambda: [None, None])
    """Per microbatch, the last one that it waits for of the stage after, and of the stage before; None where
    there is no such stage."""
    ends: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    sent: list[list[int]] = field(default_factory=lambda: [[], []])
    """The ends of the stages that it waits for."""


@dataclass
class _Group:
    bound: int | None
    stages: list[tuple[int, Stage]]
    """The last first: of two that could start at once the later one does."""
    held: list[tuple[Stage, list[int]]]
    """Those that go backward, with `StageNeeds.ahead`."""
    needed: list[int]
    """Per microbatch of the last ministage, what is held when it alone goes backward next."""
    free_at: int = 0
    was_forward: bool = False
    """What it did last."""
    num_held: int = 0
    """Microbatches in flight, of all ministages."""
    most_held: int = 0
    refused: dict[int, int] = field(default_factory=dict)
    """By ministage that found no room, how many of the last ministage had gone backward by then: until more
    have there is none either."""

    def has_room(self, s: int, stage: Stage, last: int) -> bool:
        """Whether a microbatch more of `stage` may go forward, `last` being the first of the last ministage
        that has not gone backward: each that follows must find room for what it still needs, once all before
        it have gone backward."""
        if self.bound is None or not stage.times[0]:
            return True
        if self.num_held >= self.bound:
            return False
        if len(self.held) == 1:
            return True  # It holds no others than those that go backward next.
        if self.refused.get(s) == last:
            return False
        sent = [(len(own.ends[1]) + (own is stage) - 1, ahead) for own, ahead in self.held]
        for later in range(last, len(self.needed)):
            beyond = 0
            for number, ahead in sent:
                if number > ahead[later]:
                    beyond += number - ahead[later]
            if not beyond:
                break  # From here on it holds what is needed alone, for which the bound is enough.
            if self.needed[later] + beyond > self.bound:
                self.refused[s] = last
                return False
        return True


class Ordered(NamedTuple):
    """What all groups compute, everything after what it waits for."""

    computations: list[Computation]
    most_in_flight: tuple[int, ...]
    """Microbatches of each group that are forward and not backward, of all of its ministages, at most."""
    time: int
    """When all is done."""


_Due = tuple[float, bool, int, bool]
"""When something starts; false before true: backwards first, or what the group did not do last; the
ministage, negative: the deepest first; whether it is forward. The least of all groups' is what happens
next."""
_NOTHING: _Due = (math.inf, True, 0, True)


def make_stages(
    owners: Sequence[int],
    sizes: Sequence[Sequence[int]],
    passes: Sequence[int],
    needs: StageNeeds,
    *,
    transfer_passes: int = 0,
) -> list[Stage]:
    """Ministages in nominal time.

    Args:
        sizes: rows of each group's microbatches.
        passes: what a backward of each ministage takes, in forwards; 0 where it only goes forward.
        transfer_passes: what a transfer to a ministage takes, in its longest forwards.
    """
    # Of a group's whole time, in forwards of a row through one of its ministages.
    shares = [
        sum(rows) * sum(1 + back for owner, back in zip(owners, passes, strict=True) if owner == g)
        for g, rows in enumerate(sizes)
    ]
    whole = math.lcm(*shares)
    stages = []
    for g, back in zip(owners, passes, strict=True):
        forward_time = [whole // shares[g] * num_rows for num_rows in sizes[g]]
        times = [back * time for time in forward_time] if back else [], forward_time
        stages.append(Stage(g, times, delay=transfer_passes * max(forward_time)))
    for (stage, following), between in zip(pairwise(stages), needs.between, strict=True):
        following.needs[1], stage.needs[0] = between
        following.sent[1], stage.sent[0] = stage.ends[1], following.ends[0]
    return stages


def run_in_nominal_time(stages: Sequence[Stage], needs: StageNeeds, bounds: Sequence[int | None]) -> Ordered:
    """All groups side by side: each does what can start first, and does it to its end. `bounds` of each group
    let a step end (`StageNeeds.find_least`)."""
    run = run_one_each(stages, bounds) if len(stages) == len(bounds) else run_several(stages, needs, bounds)
    assert len(run.computations) == sum(len(times) for stage in stages for times in stage.times), (
        "bounds were checked before"
    )
    return run


def run_one_each(stages: Sequence[Stage], bounds: Sequence[int | None]) -> Ordered:
    """Where each group has one ministage, in seven tenths of the time. What it holds is what goes backward
    next, so that below its bound there is room."""
    computations: list[Computation] = []
    free_at, num_held, most_held = [0] * len(stages), [0] * len(stages), [0] * len(bounds)
    limits = [math.inf if bound is None else bound for bound in bounds]
    # Once for all: this is asked for twice a computation.
    of_stage = [
        (own.ends, len(own.times[0]), len(own.times[1]), own.needs, own.sent, own.delay, limits[own.group])
        for own in stages
    ]

    def find_next(s: int) -> tuple[float, bool, int]:
        """As `_Due`, without what it did last."""
        ends, num_back, num_forth, (later, earlier), (later_ends, earlier_ends), delay, limit = of_stage[s]
        m, n, free = len(ends[0]), len(ends[1]), free_at[s]
        start = math.inf
        if m < n and m < num_back:
            if later is None:
                return free, False, -s
            if later[m] < len(later_ends):
                start = later_ends[later[m]] + delay
                if start <= free:
                    return free, False, -s
        if n < num_forth and (num_held[s] < limit or not num_back):
            if earlier is None:
                return (free, True, -s) if free < start else (start, False, -s)
            if earlier[n] < len(earlier_ends):
                first = max(free, earlier_ends[earlier[n]] + delay)
                if first < start:
                    return first, True, -s
        return start, False, -s

    upcoming = [find_next(s) for s in range(len(stages))]
    while (due := min(upcoming))[0] < math.inf:
        start, is_forward, from_end = due
        s = -from_end
        stage = stages[s]
        ends = stage.ends[is_forward]
        computations.append(Computation(s, is_forward, len(ends)))
        free_at[s] = int(start) + stage.times[is_forward][len(ends)]
        ends.append(free_at[s])
        if stage.times[0]:
            num_held[s] += 1 if is_forward else -1
            most_held[stage.group] = max(most_held[stage.group], num_held[s])
        upcoming[s] = find_next(s)
        receiver = s + 1 if is_forward else s - 1
        if 0 <= receiver < len(stages):
            upcoming[receiver] = find_next(receiver)
    return Ordered(computations, tuple(most_held), max(free_at))


def run_several(stages: Sequence[Stage], needs: StageNeeds, bounds: Sequence[int | None]) -> Ordered:
    """Whatever number of ministages each group has."""
    groups = [_make_group(g, bound, stages, needs) for g, bound in enumerate(bounds)]
    computations: list[Computation] = []
    upcoming = [_find_next(group, 0) for group in groups]
    final, num_last = len(stages) - 1, 0
    while (due := min(upcoming)) is not _NOTHING:
        # What is not known yet waits for something that starts no sooner, and so comes later.
        start, _, from_end, is_forward = due
        s = -from_end
        stage = stages[s]
        g, ends = stage.group, stage.ends[is_forward]
        group = groups[g]
        computations.append(Computation(s, is_forward, len(ends)))
        group.was_forward = is_forward
        group.free_at = int(start) + stage.times[is_forward][len(ends)]
        ends.append(group.free_at)
        if stage.times[0]:
            group.num_held += 1 if is_forward else -1
            group.most_held = max(group.most_held, group.num_held)
        if s == final and not is_forward:
            num_last += 1
            for h, other in enumerate(groups):
                if h == g or other.refused or h == stages[s - 1].group:  # There may be room now.
                    upcoming[h] = _find_next(other, num_last)
            continue
        upcoming[g] = _find_next(group, num_last)
        receiver = s + 1 if is_forward else s - 1
        if 0 <= receiver <= final and stages[receiver].group != g:
            h = stages[receiver].group
            upcoming[h] = _find_next(groups[h], num_last)
    return Ordered(
        computations, tuple(group.most_held for group in groups), max(group.free_at for group in groups)
    )


def _make_group(g: int, bound: int | None, stages: Sequence[Stage], needs: StageNeeds) -> _Group:
    own = [(s, stage) for s, stage in enumerate(stages) if stage.group == g]
    going_back = [s for s, stage in own if stage.times[0]]
    held = [(stages[s], needs.ahead[s]) for s in going_back]
    needed = [
        sum(needs.ahead[s][last] + 1 - needs.behind[s][last] for s in going_back)
        for last in range(len(needs.ahead[-1]))
    ]
    return _Group(bound, own[::-1], held, needed)


def _find_next(group: _Group, last: int) -> _Due:
    """What a group does next, as far as is known; `_NOTHING` if it waits for what has not been computed.
    Asked for after every computation, it calls nothing that it need not."""
    best = _NOTHING
    free_at, was_forward = group.free_at, group.was_forward
    alternates = len(group.stages) > 1
    for s, stage in group.stages:
        backward_ends, forward_ends = stage.ends
        later_ends, earlier_ends = stage.sent
        needs_later, needs_earlier = stage.needs
        m, num_forward = len(backward_ends), len(forward_ends)
        start = free_at
        if m < num_forward and m < len(stage.times[0]):
            is_known = needs_later is None
            if needs_later is not None and needs_later[m] < len(later_ends):
                is_known, start = True, max(free_at, later_ends[needs_later[m]] + stage.delay)
            if is_known:
                found = start, alternates and not was_forward, -s, False
                if found < best:
                    best = found
        start = free_at
        if num_forward < len(stage.times[1]):
            is_known = needs_earlier is None
            if needs_earlier is not None and needs_earlier[num_forward] < len(earlier_ends):
                is_known, start = True, max(free_at, earlier_ends[needs_earlier[num_forward]] + stage.delay)
            if is_known:
                found = start, was_forward or not alternates, -s, True
                if found < best and group.has_room(s, stage, last):
                    best = found
    return best
