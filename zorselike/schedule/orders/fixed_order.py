"""Whole schedules around the orders of computation that other systems fix, such as 1F1B.

What these systems ask of a plan with several groups: every rank has the same number of microbatches, and
microbatch `m` is the same rows in all groups.

Parameters that ZeRO 1 or 2 shard are gathered once a step and kept from first to last use: an order that
returns to a ministage again and again would else gather them every time. So of the checker's rules one
cannot hold with several ministages a group and ZeRO 2, that at most two ministages are gathered and one
has whole gradients; all others do. `as_checked` gives the plan for which `check` proves these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import COMPUTE, Action
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.lowering.complete import add_surroundings, find_transfers
from zorselike.schedule.lowering.host_copies import add_host_copies
from zorselike.schedule.spec import Demands


def as_checked(plan: Plan) -> Plan:
    """The plan with ZeRO 1 for ZeRO 2, for which `check` accepts a list of these builders."""
    groups = tuple(replace(group, zero=1) if group.zero == 2 else group for group in plan.groups)
    return replace(plan, groups=groups)


def refuse_uneven(plan: Plan, name: str) -> int:
    """The most microbatches of any rank; raises `ScheduleError` where ranks of several groups have different
    numbers, or what is offloaded has no place in such an order."""
    counts = {rank: len(plan.microbatches_of_rank(rank)) for rank in sorted(plan.group_of_rank)}
    num_microbatches = counts[min(counts)]
    for rank, count in counts.items():
        if count != num_microbatches and len(plan.groups) > 1:
            raise ScheduleError(
                f"{name}: rank {rank} has {count} microbatches and rank {min(counts)} has "
                f"{num_microbatches}; give every rank of every group the same number"
            )
    for g, group in enumerate(plan.groups):
        if set(group.offload) - {"optimizer"}:
            raise ScheduleError(
                f'{name}: group {g} offloads {list(group.offload)}; this order knows "optimizer" alone'
            )
    return max(counts.values())


def refuse_other_rows(demands: Demands, lists: Mapping[int, Sequence[Action]], name: str) -> None:
    """Raises `ScheduleError` if rows of a microbatch come from another one of the group before."""
    for own in find_transfers(demands, lists).values():
        for send, receive in (pair for pairs in own for pair in pairs):
            if send.microbatch != receive.microbatch:
                raise ScheduleError(
                    f"{name}: rows [{send.start}:{send.stop}) are in microbatch {send.microbatch} of "
                    f"ministage {send.ministage} and in microbatch {receive.microbatch} of ministage "
                    f"{receive.ministage}; lay rows so that microbatch m is the same rows in every group"
                )


def complete(
    demands: Demands, lists: Mapping[int, Sequence[Action]], *, masters: bool
) -> dict[int, list[Action]]:
    """Gathers, reductions, updates and copies around computations and transfers.

    Args:
        demands: of the plan `as_checked`.
        lists: computations of as many microbatches as the group's ranks have at most, so that all ranks
            of a group get the same collectives in the same order.
    """
    return {
        rank: add_host_copies(
            demands.plan,
            rank,
            _without_dummies(demands, rank, add_surroundings(demands, rank, own)),
            lowest_backward=demands.lowest_backward,
            masters=masters,
        )
        for rank, own in lists.items()
    }


def _without_dummies(demands: Demands, rank: int, actions: Sequence[Action]) -> list[Action]:
    """A rank with fewer microbatches than others computes no more than its own; with ZeRO 3 it joins the
    collectives inside the others' computations."""
    if demands.group_of_rank(rank).zero == 3:
        return list(actions)
    count = len(demands.plan.microbatches_of_rank(rank))
    return [a for a in actions if a.kind not in COMPUTE or (a.microbatch or 0) < count]
