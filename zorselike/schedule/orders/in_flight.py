"""An order that holds the activations of few microbatches.

With one ministage a group as PipeDream-Flush (Narayanan et al. 2021, section 2.2.1), known as 1F1B: a group
goes backward before it goes forward wherever it can. With several as its interleaved form (section 2.2.2): a
group goes forward and backward in turn where both could start, through the later of its ministages first.
With `max_in_flight` microbatches forward and not backward, of all of its ministages, it goes no further
forward. Here groups may have different numbers of microbatches, of any rows, and ministages in any order.

Microbatch `m` of a group is microbatch `m` of all of its ranks. They follow one order, so that they meet in
the same collectives; a rank leaves out the microbatches that it does not have.

Which computation comes first is found by running all groups side by side in nominal time, in which every
group takes as long as any other for the whole batch, and as long for each of its ministages: a plan says
nothing of speeds, and one that is worth running is balanced. Where groups would take longer so than by turns
(`regular.py`) they go by turns.

A group with several ministages could fill what it may hold with microbatches whose gradients wait for those
that then find no room. So one goes forward only if room is left for every microbatch of the last ministage
to go through in turn, as Dijkstra's banker lends (`nominal_time.py`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from zorselike.errors import PlanError
from zorselike.plan.plan import Group, Plan
from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.orders.nominal_time import Needs, StageNeeds, make_stages, run_in_nominal_time
from zorselike.schedule.orders.regular import order_computations
from zorselike.schedule.spec import ScheduleSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Integers = npt.NDArray[np.int64]

BACKWARD_PASSES = {"none": 2, "layer": 3}
"""What a backward takes, in forwards, by the group's `recompute`."""

TRANSFER_PASSES = 8
"""What a transfer between the last ministages takes, in forwards, as no bound says how many microbatches are
to be in flight there: with fewer, groups whose speeds are not those of a balanced plan, or that slow links
join, wait for each other; with more they go backward later."""


class LowBoundError(ScheduleError, PlanError):
    """No schedule keeps a plan's `max_in_flight`: a mistake in the plan that only its schedule shows."""


def order_in_flight(spec: ScheduleSpec) -> tuple[tuple[Action, ...], ...]:
    """The computations of every group, in order. Ministages below the lowest backward only go forward,
    without bound. Raises `LowBoundError` if no step ends with a group's bound; it names each such group and
    the least bound."""
    plan = spec.plan
    needs = _find_all_needs(plan)
    _refuse_low_bounds(spec, needs)
    owners = [ministage.group for ministage in plan.ministages]
    rows = [_count_rows(group) for group in plan.groups]
    stages = make_stages(owners, rows, _list_passes(spec), needs)
    bounds = [group.max_in_flight for group in plan.groups]
    orders: list[list[Action]] = [[] for _ in plan.groups]
    for i, is_forward, microbatch in order_computations(stages, needs, bounds).computations:
        orders[owners[i]].append(Action(Kind.F if is_forward else Kind.B, i, microbatch))
    return tuple(map(tuple, orders))


def order_last_ministages(spec: ScheduleSpec, first: int) -> dict[int, list[Action]]:
    """The computations of the ministages from `first` on, each of another group, by ministage: in the order
    in which they can be done if all inputs of the first one are there, backward before forward."""
    plan = spec.plan
    groups = [plan.groups[ministage.group] for ministage in plan.ministages[first:]]
    owners = range(len(groups))
    needs = StageNeeds.among(
        owners, groups[-1].max_microbatches, lambda a, b: find_needs(groups[a], groups[b])
    )
    rows = [_count_rows(group) for group in groups]
    stages = make_stages(owners, rows, _list_passes(spec, first), needs, transfer_passes=TRANSFER_PASSES)
    found: dict[int, list[Action]] = {first + i: [] for i in owners}
    for i, is_forward, m in run_in_nominal_time(stages, needs, [None] * len(groups)).computations:
        found[first + i].append(Action(Kind.F if is_forward else Kind.B, first + i, m))
    return found


def _list_passes(spec: ScheduleSpec, first: int = 0) -> list[int]:
    """What a backward of each ministage from `first` on takes, in forwards; 0 where there is none."""
    return [
        BACKWARD_PASSES[spec.plan.group_of(i).recompute] if i >= spec.lowest_backward else 0
        for i in range(first, spec.plan.num_ministages)
    ]


def least_in_flight(plan: Plan, *, lowest_backward: int = 0) -> tuple[int, ...]:
    """Per group, the least `max_in_flight` with which a step of the plan ends: as many as it has ministages
    that go backward where all rows match; 1 if it has none.

    No group's depends on the bounds of the others, nor on those of `plan`: the gradients of a
    microbatch come back once the microbatches of the last ministage that it was made into have gone backward,
    and before those went backward, they went forward.
    """
    return _find_least(plan, _find_all_needs(plan), lowest_backward)


def _find_least(plan: Plan, needs: StageNeeds, lowest_backward: int) -> tuple[int, ...]:
    return needs.find_least([plan.ministages_of_group(g) for g in range(len(plan.groups))], lowest_backward)


def _refuse_low_bounds(spec: ScheduleSpec, needs: StageNeeds) -> None:
    least_of = _find_least(spec.plan, needs, spec.lowest_backward)
    low = [
        f"groups[{g}].max_in_flight is {group.max_in_flight} and must be {least} or more"
        for g, (group, least) in enumerate(zip(spec.plan.groups, least_of, strict=True))
        if group.max_in_flight is not None and group.max_in_flight < least
    ]
    if low:
        raise LowBoundError(
            f"{'; '.join(low)}: only then can the groups that follow send back the gradients of the first "
            "microbatches; raise them, or let microbatches of neighbouring groups be of the same rows"
        )


# -- who waits for whom ------------------------------------------------------------------------


def _find_all_needs(plan: Plan) -> StageNeeds:
    owners = [ministage.group for ministage in plan.ministages]
    return StageNeeds.among(
        owners,
        plan.groups[owners[-1]].max_microbatches,
        lambda a, b: find_needs(plan.groups[a], plan.groups[b]),
    )


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


def _count_rows(group: Group) -> list[int]:
    """Per microbatch, the rows of the rank that has most: its ranks compute side by side."""
    rows = [0] * group.max_microbatches
    for microbatches in group.microbatches_by_rank.values():
        for m, microbatch in enumerate(microbatches):
            rows[m] = max(rows[m], microbatch.num_rows)
    return rows
