"""Actions as flat tuples, proven to have exactly the fields of their kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import TRANSFERS, Action, Kind
from zorselike.schedule.errors import ScheduleError, error_at, name_place

NONE = -1
"""Stands for a field that the kind does not have."""


class Step(NamedTuple):
    """An `Action` whose fields are all integers, as the checks read each of them many times."""

    kind: Kind
    ministage: int
    microbatch: int
    peer: int
    start: int
    stop: int
    first: int
    """Position of the sequence, and with `last` the one after the last; both `NONE` for all."""
    last: int


_NEEDS_MICROBATCH = frozenset({Kind.F, Kind.B}) | TRANSFERS
_MAY_HAVE_MICROBATCH = _NEEDS_MICROBATCH | {Kind.REDUCE_GRAD, Kind.LOAD, Kind.OFFLOAD}


def flatten(plan: Plan, actions: Mapping[int, Sequence[Action]]) -> dict[int, list[Step]]:
    """Every rank's list as `Step`s, by rank; raises `ScheduleError` on a malformed action."""
    if set(actions) != set(plan.group_of_rank):
        missing = sorted(set(plan.group_of_rank) - set(actions))
        unknown = sorted(set(actions) - set(plan.group_of_rank))
        raise ScheduleError(
            f"the schedule lacks ranks {missing} and has ranks {unknown} that the plan does not know: "
            "give one list for every rank of the plan"
        )
    return {rank: _flatten_rank(plan, actions, rank) for rank in sorted(actions)}


def _flatten_rank(plan: Plan, actions: Mapping[int, Sequence[Action]], rank: int) -> list[Step]:
    steps = []
    ministages = frozenset(plan.ministages_of_rank(rank))
    for position, action in enumerate(actions[rank]):
        fault = _find_fault(plan, ministages, rank, action)
        if fault:
            place = (rank, position)
            raise error_at(actions, f"{name_place(actions, place)}: {fault}", place)
        first, last = action.positions or (NONE, NONE)
        rows = action.peer, action.start, action.stop
        numbers = (action.ministage, action.microbatch, *rows, first, last)
        steps.append(Step(action.kind, *(NONE if number is None else number for number in numbers)))
    return steps


def _find_fault(plan: Plan, ministages: frozenset[int], rank: int, action: Action) -> str | None:
    """What is wrong with the action by itself, or None."""
    kind = action.kind
    if kind is Kind.NORM:
        return None if action == Action(Kind.NORM) else "NORM stands alone, as it concerns all ranks"
    if action.ministage not in ministages:
        return f"the group of rank {rank} owns ministages {sorted(ministages)} and not {action.ministage}"
    if action.microbatch is None and kind in _NEEDS_MICROBATCH:
        return f"{kind.value} needs the number of a microbatch"
    if action.microbatch is not None and kind not in _MAY_HAVE_MICROBATCH:
        return f"{kind.value} concerns a whole ministage and takes no microbatch"
    if kind not in TRANSFERS:
        fields = (action.peer, action.start, action.stop, action.positions)
        rowless = fields == (None,) * 4
        return None if rowless else f"{kind.value} has no peer and no rows"
    if action.peer is None or action.start is None or action.stop is None:
        return f"{kind.value} needs a peer and its rows, such as @4[3:5]"
    if action.peer not in plan.group_of_rank:
        return f"the plan has no rank {action.peer}"
    if not action.start < action.stop:
        return f"rows [{action.start}:{action.stop}) are none"
    return _find_positions_fault(plan, rank, action.peer, action.positions)


def _find_positions_fault(plan: Plan, rank: int, peer: int, positions: tuple[int, int] | None) -> str | None:
    if not plan.has_replicas and positions is None:
        return None
    is_shared = max(plan.replica_of(end).degree for end in (rank, peer)) > 1
    if is_shared != (positions is not None):
        return (
            f"ranks {rank} and {peer} are both alone in their replicas, and all positions travel between them"
            if positions
            else f"rank {rank} or rank {peer} has a part of the positions: say which, as in @4[3:5,0:8]"
        )
    if positions is not None and not 0 <= positions[0] < positions[1]:
        return f"positions [{positions[0]}:{positions[1]}) are no part of a row"
    return None
