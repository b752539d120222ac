"""The plan for those who are left, by rule: groups and ministages stay, shares move within a group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from zorselike.errors import PlanError
from zorselike.plan.parts import Group, Microbatch, Ministage
from zorselike.plan.plan import Plan


class Kept(NamedTuple):
    """A plan for fewer ranks."""

    plan: Plan
    old_ranks: tuple[int, ...]
    """Of each of its ranks, which it was."""


def without_ranks(plan: Plan, gone: Collection[int], apart: Collection[int] = ()) -> Kept:
    """The plan without some of its ranks.

    The rows of a rank that is gone go to the others of its group, by the share that each has already and in
    microbatches no larger than its own. Of a tensor-parallel replica that has lost a rank the others make as
    few replicas as their degrees allow, with a share of its rows each. Where a whole group is gone, its
    layers go to the ministages before and after.

    Args:
        plan: a valid plan.
        gone: ranks that are there no more.
        apart: ranks that stay and cannot compute with the others of their replica.

    Raises:
        PlanError: Nobody is left.
    """
    groups = [_without(group, gone, apart) for group in plan.groups]
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


class _Entry(NamedTuple):
    """A replica of what is left of a group, single ranks included."""

    ranks: tuple[int, ...]
    share: float
    """Of rows, beside those of the others."""
    limit: int
    """Rows that it computes at once at most."""
    is_whole: bool
    """Whether it was one before, and keeps its microbatches."""


def _without(group: Group, gone: Collection[int], apart: Collection[int]) -> Group | None:
    """None if nobody of the group is left."""
    entries = _list_entries(group, gone, apart)
    if not entries:
        return None
    if not any(entry.share for entry in entries):
        entries = [entry._replace(share=len(entry.ranks)) for entry in entries]
    of_first = {entry.ranks[0]: entry for entry in entries}
    whole = {first for first, entry in of_first.items() if entry.is_whole}
    dealt = {
        first: sum(each.num_rows for each in group.microbatches_by_rank[first]) if first in whole else 0
        for first in of_first
    }
    microbatches: list[Microbatch] = []
    for microbatch in group.microbatches:
        if microbatch.rank in whole:
            microbatches.append(microbatch)
            continue
        start = microbatch.start
        while start < microbatch.stop:
            rank = min(
                (first for first, entry in of_first.items() if entry.share),
                key=lambda first: (dealt[first] / of_first[first].share, first),
            )
            stop = min(microbatch.stop, start + of_first[rank].limit)
            microbatches.append(Microbatch(rank, start, stop))
            dealt[rank] += stop - start
            start = stop
    ranks = tuple(entry.ranks if len(entry.ranks) > 1 else entry.ranks[0] for entry in entries)
    return replace(group, ranks=ranks, microbatches=tuple(microbatches))


def _list_entries(group: Group, gone: Collection[int], apart: Collection[int]) -> list[_Entry]:
    """What is left of each replica, in the group's order."""
    left = [[rank for rank in replica.ranks if rank not in gone] for replica in group.replicas]
    together = [
        [rank for rank in ranks if rank not in apart] if len(replica.ranks) > 1 else ranks
        for replica, ranks in zip(group.replicas, left, strict=True)
    ]
    degrees = divide_replicas([replica.degree for replica in group.replicas], [*map(len, together)])
    largest = max(microbatch.num_rows for microbatch in group.microbatches)
    entries = []
    for replica, ranks, joined, own in zip(group.replicas, left, together, degrees, strict=True):
        booked = group.microbatches_by_rank[replica.first]
        share = sum(each.num_rows for each in booked)
        limit = max((each.num_rows for each in booked), default=largest)
        parts: list[tuple[int, ...]] = [(rank,) for rank in ranks if rank not in joined]
        for end, degree in zip(accumulate(own), own, strict=True):
            parts.append(tuple(joined[end - degree : end]))
        entries += [
            _Entry(
                part,
                share * len(part) / replica.degree,
                max(1, limit * len(part) // replica.degree),
                part == replica.ranks,
            )
            for part in sorted(parts, key=lambda part: ranks.index(part[0]))
        ]
    return entries


def divide_replicas(before: Sequence[int], left: Sequence[int]) -> list[list[int]]:
    """Degrees of the replicas that what is left of some makes, so that each divides the group's largest.

    Args:
        before: degree of each replica.
        left: how many of its ranks are left.

    Returns:
        For each, the degrees, the largest first: those that lost nobody stay as they are if they can, and
        there are as few replicas as may be.
    """
    best: tuple[tuple[int, int], list[list[int]]] | None = None
    for most in range(max(left, default=0), 0, -1):
        fitting = [degree for degree in range(most, 0, -1) if most % degree == 0]
        found = [_cut_greedily(size, fitting) for size in left]
        if max((degree for own in found for degree in own), default=0) != most:
            continue  # What divides it need not divide what there is.
        kept = sum(own == [degree] for own, degree in zip(found, before, strict=True))
        score = kept, -sum(map(len, found))
        if best is None or score > best[0]:
            best = score, found
    return best[1] if best else [[] for _ in left]


def _cut_greedily(size: int, fitting: Sequence[int]) -> list[int]:
    found = []
    for degree in fitting:
        found += [degree] * (size // degree)
        size %= degree
    return found


def _renumber(group: Group, new_rank: dict[int, int]) -> Group:
    return replace(
        group,
        ranks=tuple(
            new_rank[entry] if isinstance(entry, int) else tuple(new_rank[rank] for rank in entry)
            for entry in group.ranks
        ),
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
