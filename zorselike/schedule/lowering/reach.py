"""How far other groups have to have come before something is computed.

A receive that is posted occupies a GPU until its rows come, and a GPU that is occupied may keep its host
from going on: loading a kernel that was never launched, giving memory back or pinning it waits for all that
runs (CUDA C++ Programming Guide, "Lazy Loading"). So none may be posted before what its sender waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.spec import ScheduleSpec
from zorselike.schedule.transfers import match_rows

Reach = tuple[int, ...]
"""Per group, the last position among its computations; -1 where none."""


def find_reach(spec: ScheduleSpec, computations: Sequence[Sequence[Action]]) -> list[list[Reach]]:
    """Per group and computation, how far each group has come once it is done, as far as that is certain. A
    group counts as one: what any of its ranks waits for all wait for. Where groups, so taken, wait for each
    other in a circle, nothing is certain; if its ranks do not, the checker finds what is early."""
    needs = _list_needs(spec, computations)
    found: list[list[Reach]] = [[] for _ in computations]
    nothing = (-1,) * len(computations)
    waiting: defaultdict[int, set[int]] = defaultdict(set)
    to_do = [*range(len(computations))]
    while to_do:
        g = to_do.pop()
        own, begun = found[g], len(found[g])
        reach = own[-1] if own else nothing
        while len(own) < len(needs[g]):
            needed = needs[g][len(own)]
            missing = [h for h, position in needed if position >= len(found[h])]
            if missing:
                waiting[missing[0]].add(g)
                break
            for h, position in needed:
                if position > reach[h]:
                    reach = tuple(map(max, reach, found[h][position]))
            reach = (*reach[:g], len(own), *reach[g + 1 :])
            own.append(reach)
        if len(own) > begun:
            to_do += waiting.pop(g, ())
    for own, in_order in zip(found, computations, strict=True):
        own += [nothing] * (len(in_order) - len(own))
    return found


def _list_needs(
    spec: ScheduleSpec, computations: Sequence[Sequence[Action]]
) -> list[list[list[tuple[int, int]]]]:
    """Per group and computation, those of other groups whose rows it takes: groups and positions."""
    plan = spec.plan
    owners = [ministage.group for ministage in plan.ministages]
    positions = [{action: position for position, action in enumerate(in_order)} for in_order in computations]
    shared: dict[tuple[int, int], Mapping[int | None, set[int]]] = {}

    def find(g: int, action: Action) -> list[tuple[int, int]]:
        assert action.ministage is not None
        before = action.ministage + (-1 if action.kind is Kind.F else 1)
        if not 0 <= before < len(owners) or owners[before] == g:
            return []
        h = owners[before]
        if (h, g) not in shared:
            shared[h, g] = _share_rows(spec, h, g)
        needed = [Action(action.kind, before, number) for number in shared[h, g].get(action.microbatch, ())]
        return [(h, positions[h][own]) for own in needed if own in positions[h]]

    return [[find(g, action) for action in in_order] for g, in_order in enumerate(computations)]


def _share_rows(spec: ScheduleSpec, source: int, target: int) -> Mapping[int | None, set[int]]:
    """By microbatch of one group those of another that have some of its rows."""
    found: defaultdict[int | None, set[int]] = defaultdict(set)
    for rows in match_rows(spec.plan.groups[source], spec.plan.groups[target]):
        found[rows.target_microbatch].add(rows.source_microbatch)
    return found
