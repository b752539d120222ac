"""Interleaved 1F1B: 1F1B in which every group has several ministages, visited in turn.

Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.2, and Megatron-LM's
`forward_backward_pipelining_with_interleaving`. For comparison: our runtime runs `ours.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.orders.even_plans import check_even
from zorselike.schedule.orders.order import Order
from zorselike.schedule.spec import ScheduleSpec

NAME = "interleaved 1F1B"


def interleaved(spec: ScheduleSpec) -> Order:
    """For plans whose ministages visit all groups in turn, equally often, and whose ranks all have equally
    many microbatches, a multiple of the number of groups, of the same rows.

    Raises:
        ScheduleError: The plan has another shape; says where.
    """
    plan = spec.plan
    num_groups = len(plan.groups)
    groups = [ministage.group for ministage in plan.ministages]
    if len(set(groups[:num_groups])) < num_groups or groups != groups[:num_groups] * (
        len(groups) // num_groups
    ):
        raise ScheduleError(
            f"{NAME}: ministages belong to groups {groups}; let them visit all groups in turn, equally often"
        )
    num_microbatches = check_even(plan, NAME)
    if num_microbatches % num_groups:
        raise ScheduleError(
            f"{NAME}: {num_microbatches} microbatches for {num_groups} groups; give a multiple of these"
        )
    return Order(
        tuple(
            _order(spec, groups.index(g), plan.ministages_of_group(g), num_microbatches)
            for g in range(num_groups)
        ),
        keeps_gathered=True,
    )


def _order(
    spec: ScheduleSpec, place: int, ministages: Sequence[int], num_microbatches: int
) -> tuple[Action, ...]:
    """The computations of the group that comes `place`-th: as many microbatches as there are groups go
    through a ministage, then through the next."""
    num_groups = len(spec.plan.groups)
    total = num_microbatches * len(ministages)
    cycle = num_groups * len(ministages)
    turns = [(k % cycle // num_groups, k // cycle * num_groups + k % num_groups) for k in range(total)]
    forwards = [Action(Kind.F, ministages[turn], m) for turn, m in turns]
    backwards = [Action(Kind.B, ministages[-1 - turn], m) for turn, m in turns]
    ahead = total
    if num_microbatches > num_groups:
        ahead = min(2 * (num_groups - place - 1) + (len(ministages) - 1) * num_groups, total)
    steady = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    order = [*forwards[:ahead], *steady, *backwards[total - ahead :]]
    return tuple(a for a in order if a.kind is Kind.F or (a.ministage or 0) >= spec.lowest_backward)
