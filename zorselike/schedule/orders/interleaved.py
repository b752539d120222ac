"""Interleaved 1F1B: 1F1B in which every group has several ministages, visited in turn.

Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.2, and Megatron-LM's
`forward_backward_pipelining_with_interleaving`. To compare with; `zorselike/schedule/lowering/build.py`
builds ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.lowering.complete import add_transfers
from zorselike.schedule.orders.fixed_order import as_checked, complete, refuse_other_rows, refuse_uneven
from zorselike.schedule.spec import Demands, work_out_demands

NAME = "interleaved 1F1B"


def build_interleaved(
    plan: Plan,
    *,
    trainable: Sequence[bool] | None = None,
    ties: Sequence[tuple[int, int]] = (),
    defer_steps: bool = False,
    masters: bool = False,
) -> dict[int, list[Action]]:
    """The actions of every rank for one optimizer step.

    Args:
        plan: its ministages visit all groups in turn, equally often; all ranks have equally many
            microbatches, a multiple of the number of groups, of the same rows.

    The other options are those of `build`. `check` accepts the lists for `as_checked(plan)`.

    Raises:
        ScheduleError: The plan has another shape; says where.
    """
    num_groups = len(plan.groups)
    owners = [ministage.group for ministage in plan.ministages]
    if len(set(owners[:num_groups])) < num_groups or owners != owners[:num_groups] * (
        len(owners) // num_groups
    ):
        raise ScheduleError(
            f"{NAME}: ministages belong to groups {owners}; let them visit all groups in turn, equally often"
        )
    num_microbatches = refuse_uneven(plan, NAME)
    if num_microbatches % num_groups:
        raise ScheduleError(
            f"{NAME}: {num_microbatches} microbatches for {num_groups} groups; give a multiple of these"
        )
    demands = work_out_demands(
        as_checked(plan),
        trainable=trainable,
        ties=ties,
        forward_only=False,
        defer_steps=defer_steps,
        masters=masters,
    )
    lists = {
        rank: _order(demands, owners.index(group), plan.ministages_of_group(group), num_microbatches)
        for rank, group in sorted(plan.group_of_rank.items())
    }
    refuse_other_rows(demands, lists, NAME)
    return complete(demands, add_transfers(demands, lists), masters=masters)


def _order(demands: Demands, place: int, own: Sequence[int], num_microbatches: int) -> list[Action]:
    """The computations of a rank of the group that comes `place`-th: as many microbatches as there are
    groups go through a ministage, then through the next."""
    num_groups = len(demands.plan.groups)
    total = num_microbatches * len(own)
    round_ = num_groups * len(own)
    turns = [(k % round_ // num_groups, k // round_ * num_groups + k % num_groups) for k in range(total)]
    forwards = [Action(Kind.F, own[turn], m) for turn, m in turns]
    backwards = [Action(Kind.B, own[-1 - turn], m) for turn, m in turns]
    ahead = total
    if num_microbatches > num_groups:
        ahead = min(2 * (num_groups - place - 1) + (len(own) - 1) * num_groups, total)
    steady = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    order = [*forwards[:ahead], *steady, *backwards[total - ahead :]]
    return [a for a in order if a.kind is Kind.F or (a.ministage or 0) >= demands.lowest_backward]
