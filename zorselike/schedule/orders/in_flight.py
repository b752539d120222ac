"""An order for plans with one ministage a group that holds the activations of few microbatches.

As PipeDream-Flush (Narayanan et al. 2021, section 2.2.1), known as 1F1B: a group goes backward before it
goes forward wherever it can, and with `max_in_flight` microbatches forward and not backward it goes no
further forward. Here groups may have different numbers of microbatches, of any rows.

Microbatch `m` of a group is microbatch `m` of all of its ranks. They follow one order, so that they meet in
the same collectives; a rank leaves out the microbatches that it does not have.

Which computation comes first is found by running all groups side by side in nominal time, in which every
group takes as long as any other for the whole batch: a plan says nothing of speeds, and one that is worth
running is balanced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from zorselike.errors import PlanError
from zorselike.plan.plan import Group, Plan
from zorselike.schedule.actions import Kind
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.spec import ScheduleSpec
from zorselike.schedule.transfers import match_rows

BACKWARD_PASSES = {"none": 2, "layer": 3}
"""What a backward takes, in forwards, by the group's `recompute`."""


class LowBoundError(ScheduleError, PlanError):
    """No schedule keeps a plan's `max_in_flight`: a mistake in the plan that only its schedule shows."""


class Computation(NamedTuple):
    """One microbatch of a group, forward or backward."""

    kind: Kind
    microbatch: int


def order_in_flight(spec: ScheduleSpec) -> tuple[tuple[Computation, ...], ...]:
    """The computations of every group, in order.

    The plan has one ministage a group. Those below the lowest backward only go forward, without bound.

    Raises:
        LowBoundError: With a group's bound no step ends; names each such group and the least bound.
    """
    plan = spec.plan
    _refuse_low_bounds(spec)
    visited = _groups_as_visited(plan)
    orders = _Run(_make_stages(plan, visited, spec.lowest_backward)).run()
    of_group = dict(zip(visited, orders, strict=True))
    return tuple(tuple(of_group[g]) for g in range(len(plan.groups)))


def count_in_flight(spec: ScheduleSpec) -> tuple[int, ...]:
    """Per group, how many microbatches are in flight at most in the order of `order_in_flight`.

    Zero for groups below the lowest backward: they keep no activations. Raises what `order_in_flight` does.
    """
    counts = [0] * len(spec.plan.groups)
    for g, order in enumerate(order_in_flight(spec)):
        if any(kind is Kind.B for kind, _ in order):
            counts[g] = max(accumulate(1 if kind is Kind.F else -1 for kind, _ in order))
    return tuple(counts)


def least_in_flight(plan: Plan) -> tuple[int, ...]:
    """Per group, the least `max_in_flight` with which a step of the plan ends; 1 where all rows match.

    No group's depends on the bounds of the others, nor on those of `plan`: the gradients of a
    microbatch come back once the microbatches of the group that they were made from have gone forward.
    """
    visited = _groups_as_visited(plan)
    least = [1] * len(plan.groups)
    ahead = list(range(plan.groups[visited[-1]].max_microbatches))
    """Per microbatch of a stage, the last that must have gone forward before that one can go backward."""
    for g, following in reversed(list(pairwise(visited))):
        needs = find_needs(plan.groups[g], plan.groups[following])
        ahead = [max(m, needs.forward[ahead[last]]) for m, last in enumerate(needs.backward)]
        least[g] = max(last - m + 1 for m, last in enumerate(ahead))
    return tuple(least)


def _refuse_low_bounds(spec: ScheduleSpec) -> None:
    plan = spec.plan
    going_back = {ministage.group for ministage in plan.ministages[spec.lowest_backward :]}
    low = [
        f"groups[{g}].max_in_flight is {group.max_in_flight} and must be {least} or more"
        for g, (group, least) in enumerate(zip(plan.groups, least_in_flight(plan), strict=True))
        if g in going_back and group.max_in_flight is not None and group.max_in_flight < least
    ]
    if low:
        raise LowBoundError(
            f"{'; '.join(low)}: only then can the groups that follow send back the gradients of the first "
            "microbatches; raise them, or let microbatches of neighbouring groups be of the same rows"
        )


def _groups_as_visited(plan: Plan) -> list[int]:
    """Groups in the order of their ministages."""
    return [ministage.group for ministage in plan.ministages]


# -- who waits for whom ------------------------------------------------------------------------


class Needs(NamedTuple):
    """Between two neighbouring groups, per microbatch of one, the last of the other that it waits for."""

    forward: list[int]
    """Per microbatch of the later group, one of the earlier."""
    backward: list[int]
    """Per microbatch of the earlier group, one of the later."""


def find_needs(earlier: Group, later: Group) -> Needs:
    """Microbatches wait for all that share a row with them, and for all that those before them wait for."""
    needs = Needs([0] * later.max_microbatches, [0] * earlier.max_microbatches)
    for _, sent, _, received, _, _ in match_rows(earlier, later):
        needs.forward[received] = max(needs.forward[received], sent)
        needs.backward[sent] = max(needs.backward[sent], received)
    return Needs(*(list(accumulate(last, max)) for last in needs))


# -- nominal time ------------------------------------------------------------------------------


@dataclass
class _Stage:
    """A group while the groups run side by side in nominal time."""

    forward_time: Sequence[int]
    """Per microbatch; integers, as ties between start times are broken by rule."""
    backward_time: Sequence[int]
    """Per microbatch; empty if the group only goes forward."""
    bound: int
    """The most microbatches in flight."""
    forward_needs: Sequence[int] | None = None
    """Per microbatch, the last one of the stage before that it waits for; None for the first stage."""
    backward_needs: Sequence[int] | None = None
    """The same of the stage after; None for the last one."""
    forward_ends: list[int] = field(default_factory=list)
    backward_ends: list[int] = field(default_factory=list)
    free_at: int = 0


def _make_stages(plan: Plan, visited: Sequence[int], lowest_backward: int) -> list[_Stage]:
    groups = [plan.groups[g] for g in visited]
    sizes = [_count_rows(group) for group in groups]
    passes = [
        BACKWARD_PASSES[group.recompute] if i >= lowest_backward else 0 for i, group in enumerate(groups)
    ]
    shares = [sum(rows) * (1 + back) for rows, back in zip(sizes, passes, strict=True)]
    whole = math.lcm(*shares)
    stages = []
    for group, rows, back, share in zip(groups, sizes, passes, shares, strict=True):
        forward_time = [whole // share * num_rows for num_rows in rows]
        backward_time = [back * time for time in forward_time] if back else []
        bound = len(rows) if group.max_in_flight is None or not back else group.max_in_flight
        stages.append(_Stage(forward_time, backward_time, bound))
    for (stage, group), (following, later) in pairwise(zip(stages, groups, strict=True)):
        following.forward_needs, stage.backward_needs = find_needs(group, later)
    return stages


def _count_rows(group: Group) -> list[int]:
    """Per microbatch, the rows of the rank that has most: its ranks compute side by side."""
    rows = [0] * group.max_microbatches
    for microbatches in group.microbatches_by_rank.values():
        for m, microbatch in enumerate(microbatches):
            rows[m] = max(rows[m], microbatch.num_rows)
    return rows


class _Next(NamedTuple):
    """What a stage does next; the least of all stages' is what happens next, backwards first."""

    start: int
    is_forward: bool
    stage: int


class _Run:
    """All stages side by side: each does what can start first, and does it to its end."""

    def __init__(self, stages: Sequence[_Stage]) -> None:
        self._stages = stages
        self._orders: list[list[Computation]] = [[] for _ in stages]

    def run(self) -> list[list[Computation]]:
        """The computations of every stage, in order."""
        upcoming = [self._find_next(s) for s in range(len(self._stages))]
        while due := [item for item in upcoming if item is not None]:
            # What is not known yet waits for something that starts no sooner, and so comes later.
            chosen = min(due)
            self._compute(chosen)
            receiver = chosen.stage + (1 if chosen.is_forward else -1)
            for s in (chosen.stage, receiver):
                if 0 <= s < len(upcoming):
                    upcoming[s] = self._find_next(s)
        assert all(
            len(order) == len(stage.forward_time) + len(stage.backward_time)
            for stage, order in zip(self._stages, self._orders, strict=True)
        ), "bounds were checked before"
        return self._orders

    def _compute(self, item: _Next) -> None:
        stage = self._stages[item.stage]
        kind = Kind.F if item.is_forward else Kind.B
        times, ends = (
            (stage.forward_time, stage.forward_ends)
            if item.is_forward
            else (stage.backward_time, stage.backward_ends)
        )
        self._orders[item.stage].append(Computation(kind, len(ends)))
        stage.free_at = item.start + times[len(ends)]
        ends.append(stage.free_at)

    def _find_next(self, s: int) -> _Next | None:
        """What the stage does next, as far as is known; None if it waits for what has not been computed."""
        stage = self._stages[s]
        options = []
        num_forward, num_backward = len(stage.forward_ends), len(stage.backward_ends)
        if num_backward < min(num_forward, len(stage.backward_time)):
            behind = None if stage.backward_needs is None else self._stages[s + 1].backward_ends
            ready = _ready_at(stage.backward_needs, behind, num_backward)
            options += [] if ready is None else [_Next(max(stage.free_at, ready), False, s)]
        if num_forward < len(stage.forward_time) and num_forward - num_backward < stage.bound:
            before = None if stage.forward_needs is None else self._stages[s - 1].forward_ends
            ready = _ready_at(stage.forward_needs, before, num_forward)
            options += [] if ready is None else [_Next(max(stage.free_at, ready), True, s)]
        return min(options, default=None)


def _ready_at(needs: Sequence[int] | None, ends: Sequence[int] | None, m: int) -> int | None:
    """When a microbatch's inputs are there; None if that is not known yet."""
    if needs is None or ends is None:
        return 0
    return ends[needs[m]] if needs[m] < len(ends) else None
