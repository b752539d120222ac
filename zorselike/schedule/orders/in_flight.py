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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from zorselike.errors import PlanError
from zorselike.plan.plan import Group, Plan
from zorselike.schedule.actions import Kind
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.spec import ScheduleSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Integers = npt.NDArray[np.int64]

BACKWARD_PASSES = {"none": 2, "layer": 3}
"""What a backward takes, in forwards, by the group's `recompute`."""


class LowBoundError(ScheduleError, PlanError):
    """No schedule keeps a plan's `max_in_flight`: a mistake in the plan that only its schedule shows."""


class Computation(NamedTuple):
    """One microbatch of a group, forward or backward."""

    kind: Kind
    microbatch: int


def order_in_flight(spec: ScheduleSpec) -> tuple[tuple[Computation, ...], ...]:
    """The computations of every group, in order, of a plan with one ministage a group. Those below the lowest
    backward only go forward, without bound. Raises `LowBoundError` if no step ends with a group's bound; it
    names each such group and the least bound."""
    plan = spec.plan
    _refuse_low_bounds(spec)
    visited = [ministage.group for ministage in plan.ministages]
    orders = _run(_make_stages(plan, visited, spec.lowest_backward))
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
    visited = [ministage.group for ministage in plan.ministages]
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


# -- who waits for whom ------------------------------------------------------------------------


class Needs(NamedTuple):
    """Between two neighbouring groups, per microbatch of one, the last of the other that it waits for."""

    forward: list[int]
    """Per microbatch of the later group, one of the earlier."""
    backward: list[int]
    """Per microbatch of the earlier group, one of the later."""


def find_needs(earlier: Group, later: Group) -> Needs:
    """Microbatches wait for all that share a row with them, and for all that those before them wait for."""
    import numpy as np  # Takes as long as all else that is imported; most plans have no bounds.

    (sent_ends, sent), (received_ends, received) = (_number_rows(group) for group in (earlier, later))
    # Every end of a microbatch of either ends a range of rows that one of each has in common.
    ends = np.union1d(sent_ends, received_ends)
    senders = sent[np.searchsorted(sent_ends, ends)]
    receivers = received[np.searchsorted(received_ends, ends)]
    forward = np.zeros(later.max_microbatches, dtype=np.int64)
    backward = np.zeros(earlier.max_microbatches, dtype=np.int64)
    np.maximum.at(forward, receivers, senders)
    np.maximum.at(backward, senders, receivers)
    return Needs(*(np.maximum.accumulate(last).tolist() for last in (forward, backward)))


def _number_rows(group: Group) -> tuple[_Integers, _Integers]:
    """The ends of all microbatches, rising, and their numbers among those of their ranks."""
    import numpy as np

    num_before: defaultdict[int, int] = defaultdict(int)
    ends, numbers = [], []
    for microbatch in group.microbatches:
        ends.append(microbatch.stop)
        numbers.append(num_before[microbatch.rank])
        num_before[microbatch.rank] += 1
    by_row = np.argsort(ends)
    return np.array(ends)[by_row], np.array(numbers)[by_row]


# -- nominal time ------------------------------------------------------------------------------


@dataclass
class _Stage:
    """A group while the groups run side by side in nominal time. Of each pair the first is of backwards."""

    bound: int
    """The most microbatches in flight."""
    times: tuple[Sequence[int], Sequence[int]]
    """Per microbatch; integers, as ties between start times are broken by rule. Of backwards none if the
    group only goes forward."""
    needs: list[Sequence[int] | None] = field(default_factory=lambda: [None, None])
    """Per microbatch, the last one that it waits for of the stage after, and of the stage before; None where
    there is no such stage."""
    ends: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
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
        stages.append(_Stage(bound, (backward_time, forward_time)))
    for (stage, group), (following, later) in pairwise(zip(stages, groups, strict=True)):
        following.needs[1], stage.needs[0] = find_needs(group, later)
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


def _run(stages: Sequence[_Stage]) -> list[list[Computation]]:
    """The computations of every stage, in order, all stages side by side: each does what can start first, and
    does it to its end."""
    orders: list[list[Computation]] = [[] for _ in stages]
    upcoming = [_find_next(stages, s) for s in range(len(stages))]
    while due := [item for item in upcoming if item is not None]:
        # What is not known yet waits for something that starts no sooner, and so comes later.
        start, is_forward, s = min(due)
        stage = stages[s]
        times, ends = stage.times[is_forward], stage.ends[is_forward]
        orders[s].append(Computation(Kind.F if is_forward else Kind.B, len(ends)))
        stage.free_at = start + times[len(ends)]
        ends.append(stage.free_at)
        for other in (s, s + 1 if is_forward else s - 1):
            if 0 <= other < len(stages):
                upcoming[other] = _find_next(stages, other)
    for stage, order in zip(stages, orders, strict=True):
        assert len(order) == sum(map(len, stage.times)), "bounds were checked before"
    return orders


def _find_next(stages: Sequence[_Stage], s: int) -> _Next | None:
    """What a stage does next, as far as is known; None if it waits for what has not been computed."""
    stage = stages[s]
    num_backward, num_forward = map(len, stage.ends)
    in_flight = num_forward - num_backward
    options = []
    for is_forward, m, may, sender in (
        (False, num_backward, in_flight > 0, s + 1),
        (True, num_forward, in_flight < stage.bound, s - 1),
    ):
        if may and m < len(stage.times[is_forward]):
            needs, ready = stage.needs[is_forward], 0
            if needs is not None:
                sent = stages[sender].ends[is_forward]
                if needs[m] >= len(sent):
                    continue
                ready = sent[needs[m]]
            options.append(_Next(max(stage.free_at, ready), is_forward, s))
    return min(options, default=None)
