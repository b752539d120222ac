"""The plan for those who are left, by rule: groups and ministages stay, shares move within a group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from zorselike.errors import PlanError
from zorselike.plan.parts import Group, Microbatch, Ministage
from zorselike.plan.plan import Plan


class Kept(NamedTuple):
    """A plan for fewer ranks."""

    plan: Plan
    old_ranks: tuple[int, ...]
    """Of each of its ranks, which it was."""


def without_ranks(plan: Plan, gone: Collection[int]) -> Kept:
    """The plan without some of its ranks.

    The rows of a rank that is gone go to the others of its group, by the share that each has already and in
    microbatches no larger than its own. Where a whole group is gone, its layers go to the ministages before
    and after.

    Raises:
        PlanError: Nobody is left.
    """
    groups = [_without(group, gone) for group in plan.groups]
    left = [g for g, group in enumerate(groups) if group is not None]
    if not left:
        raise PlanError("no rank of the plan is left")
    old_ranks = tuple(sorted(rank for rank in plan.group_of_rank if rank not in gone))
    new_rank = {old: new for new, old in enumerate(old_ranks)}
    new_group = {old: new for new, old in enumerate(left)}
    smaller = replace(
        plan,
        groups=tuple(_renumber(group, new_rank) for group in groups if group is not None),
        ministages=_without_groups(plan.ministages, new_group),
        devices=tuple(
            replace(device, rank=new_rank[device.rank]) for device in plan.devices if device.rank in new_rank
        ),
        estimates=type(plan.estimates)(),
    )
    return Kept(smaller.validate(), old_ranks)


def with_smaller_microbatches(plan: Plan, group: int) -> Plan:
    """The plan with less held at once in one group: microbatches of half the rows, or, where they are of one
    row, with recomputation.

    Raises:
        PlanError: Neither can be made smaller.
    """
    old = plan.groups[group]
    if any(microbatch.num_rows > 1 for microbatch in old.microbatches):
        halves = [half for microbatch in old.microbatches for half in _halve(microbatch)]
        new = replace(old, microbatches=tuple(halves))
    elif old.recompute == "none":
        new = replace(old, recompute="layer")
    else:
        raise PlanError(
            f"groups[{group}] computes row by row and recomputes its layers; give it fewer layers or more "
            "ranks"
        )
    groups = tuple(new if g == group else each for g, each in enumerate(plan.groups))
    return replace(plan, groups=groups, estimates=type(plan.estimates)()).validate()


def _halve(microbatch: Microbatch) -> Sequence[Microbatch]:
    middle = (microbatch.start + microbatch.stop + 1) // 2
    parts = (replace(microbatch, stop=middle), replace(microbatch, start=middle))
    return [part for part in parts if part.num_rows]


def _without(group: Group, gone: Collection[int]) -> Group | None:
    """None if nobody of the group is left."""
    left = [rank for rank in group.flat_ranks if rank not in gone]
    if not left:
        return None
    own = {rank: sum(each.num_rows for each in group.microbatches_by_rank[rank]) for rank in left}
    shares = own if any(own.values()) else dict.fromkeys(left, 1)
    largest = max(microbatch.num_rows for microbatch in group.microbatches)
    limits = {
        rank: max((each.num_rows for each in group.microbatches_by_rank[rank]), default=largest)
        for rank in left
    }
    dealt = dict(own)
    microbatches: list[Microbatch] = []
    for microbatch in group.microbatches:
        if microbatch.rank not in gone:
            microbatches.append(microbatch)
            continue
        start = microbatch.start
        while start < microbatch.stop:
            rank = min(
                (rank for rank in left if shares[rank]), key=lambda rank: (dealt[rank] / shares[rank], rank)
            )
            stop = min(microbatch.stop, start + limits[rank])
            microbatches.append(Microbatch(rank, start, stop))
            dealt[rank] += stop - start
            start = stop
    return replace(group, ranks=tuple(left), microbatches=tuple(microbatches))


def _renumber(group: Group, new_rank: dict[int, int]) -> Group:
    return replace(
        group,
        ranks=tuple(new_rank[rank] for rank in group.flat_ranks),
        microbatches=tuple(replace(each, rank=new_rank[each.rank]) for each in group.microbatches),
    )


def _without_groups(ministages: Sequence[Ministage], new_group: dict[int, int]) -> tuple[Ministage, ...]:
    """Layers of groups that are gone go to the ministages beside them: the first half to the one before."""
    kept: list[Ministage] = []
    orphans: list[str] = []
    for ministage in ministages:
        if ministage.group not in new_group:
            orphans += ministage.modules
            continue
        middle = len(orphans) // 2 if kept else 0
        if middle:
            kept[-1] = replace(kept[-1], modules=(*kept[-1].modules, *orphans[:middle]))
        modules = (*orphans[middle:], *ministage.modules)
        kept.append(Ministage(new_group[ministage.group], modules))
        orphans = []
    if orphans:
        kept[-1] = replace(kept[-1], modules=(*kept[-1].modules, *orphans))
    return tuple(kept)
