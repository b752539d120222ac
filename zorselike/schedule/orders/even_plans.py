"""What the orders of other systems ask of a plan with several groups: every rank has the same number of
microbatches, and microbatch `m` is the same rows in all groups.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from zorselike.plan.plan import Plan
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.spec import ScheduleSpec
from zorselike.schedule.transfers import match_rows


def as_checked(spec: ScheduleSpec) -> ScheduleSpec:
    """The spec for which `check` accepts a list that keeps ministages gathered: ZeRO 1 for ZeRO 2.

    With several ministages a group such a list breaks one promise of ZeRO 2, that at most two ministages are
    gathered and one has whole gradients; all other promises are proven.
    """
    groups = tuple(replace(group, zero=1) if group.zero == 2 else group for group in spec.plan.groups)
    return replace(spec, plan=replace(spec.plan, groups=groups))


def check_even(plan: Plan, name: str) -> int:
    """The most microbatches of any rank; raises `ScheduleError` where ranks of several groups have different
    numbers of them, or of different rows, or where what is offloaded has no place in such an order."""
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
    _check_same_rows(plan, name)
    return max(counts.values())


def _check_same_rows(plan: Plan, name: str) -> None:
    for ministage, (earlier, later) in enumerate(pairwise(plan.ministages)):
        if earlier.group == later.group:
            continue
        for rows in match_rows(plan.groups[earlier.group], plan.groups[later.group]):
            if rows.source_microbatch != rows.target_microbatch:
                raise ScheduleError(
                    f"{name}: rows [{rows.start}:{rows.stop}) are in microbatch {rows.source_microbatch} of "
                    f"ministage {ministage} and in microbatch {rows.target_microbatch} of ministage "
                    f"{ministage + 1}; lay rows so that microbatch m is the same rows in every group"
                )
