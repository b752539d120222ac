"""Whole schedules around the orders of computation that other systems fix, such as 1F1B.

What these systems ask of a plan: every rank has the same number of microbatches, and microbatch `m` is
the same rows in all groups. Parameters that ZeRO 1 or 2 shard are gathered once a step and kept from first
to last use: an order that returns to a ministage again and again would else gather them every time. So of
the checker's rules one cannot hold with several ministages a group and ZeRO 2, that whole gradients of
one ministage only are kept and at most two are gathered; all others do. `as_checked` gives the plan for
which `check` proves these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action
from zorselike.schedule.complete import add_surroundings, find_transfers
from zorselike.schedule.demands import Demands
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.offloading import add_host_copies


def as_checked(plan: Plan) -> Plan:
    """The plan with ZeRO 1 for ZeRO 2, for which `check` accepts a list of these builders."""
    groups = tuple(replace(group, zero=1) if group.zero == 2 else group for group in plan.groups)
    return replace(plan, groups=groups)


def refuse_uneven(plan: Plan, name: str) -> int:
    """Microbatches of each rank; raises `ScheduleError` where shares or rows differ."""
    counts = {rank: len(plan.microbatches_of_rank(rank)) for rank in sorted(plan.group_of_rank)}
    num_microbatches = counts[min(counts)]
    for rank, count in counts.items():
        if count != num_microbatches:
            raise ScheduleError(
                f"{name}: rank {rank} has {count} microbatches and rank {min(counts)} has "
                f"{num_microbatches}; give every rank of every group the same number"
            )
    for g, group in enumerate(plan.groups):
        if set(group.offload) - {"optimizer"}:
            raise ScheduleError(
                f'{name}: group {g} offloads {list(group.offload)}; this order knows "optimizer" alone'
            )
    return num_microbatches


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

    `demands`: of the plan `as_checked`.
    """
    return {
        rank: add_host_copies(
            demands.plan,
            rank,
            add_surroundings(demands, rank, own),
            lowest_backward=demands.lowest_backward,
            masters=masters,
        )
        for rank, own in lists.items()
    }
