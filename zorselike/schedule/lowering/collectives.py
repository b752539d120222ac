"""Gathers and releases of parameters, reductions, updates and exchanges of tied weights.

A pass over a group's order of computations: all of its ranks issue the same, in the same order, those too
that leave out some of the computations. With ZeRO 2 the next ministage is gathered while the current one
computes, so two are resident at most; each reduces once and steps as soon as its own backward is done. A
ministage whose microbatches go forward and at once backward is gathered once for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.lowering.phases import split_phases
from zorselike.schedule.spec import ScheduleSpec


def add_collectives(
    spec: ScheduleSpec, g: int, computations: Sequence[Action], *, keeps_gathered: bool
) -> list[Action]:
    """The group's computations with all collectives around them; raises `ScheduleError` where ZeRO 2 is to
    gather twice, and a ministage's forward or backward is in several pieces."""
    group = spec.plan.groups[g]
    phases = [_Phase(own) for own in split_phases(computations)]
    if group.zero == 1 or (group.zero == 2 and keeps_gathered):
        _gather_once(phases)
    elif group.zero == 2:
        _refuse_torn_phases(g, phases)
        _gather_twice(phases)
    # With ZeRO 3 a backward reduces by itself.
    reduces_each = group.reduces_per_microbatch and group.zero != 3
    last_backward = {phase.ministage: i for i, phase in enumerate(phases) if Kind.B in phase.kinds}
    actions: list[Action] = []
    for i, phase in enumerate(phases):
        ministage = phase.ministage
        trains = spec.trains[ministage]
        is_done = trains and last_backward.get(ministage) == i
        actions += [Action(Kind.UNSHARD, gathered) for gathered in phase.gathered]
        for computation in phase.computations:
            actions.append(computation)
            if trains and reduces_each and computation.kind is Kind.B:
                actions.append(Action(Kind.REDUCE_GRAD, ministage, computation.microbatch))
        if is_done and not group.reduces_per_microbatch:
            actions.append(Action(Kind.REDUCE_GRAD, ministage))
        if phase.releases:
            actions.append(Action(Kind.RESHARD, ministage))
        if is_done:
            actions += [Action(Kind.TIE_GRAD, ministage)] if ministage in spec.tied else []
            actions += [] if spec.defer_steps else _step(spec, ministage)
    return actions + _end_of_step(spec, g)


@dataclass
class _Phase:
    """Consecutive computations of one ministage in one direction, or in both by turns."""

    computations: list[Action]
    gathered: list[int] = field(default_factory=list)
    """Ministages to gather before it: its own if need be, then the next one, which is prefetched."""
    releases: bool = False
    """Whether its ministage is freed after it."""

    @property
    def ministage(self) -> int:
        return self.computations[0].ministage or 0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Forward, backward or both."""
        return tuple(dict.fromkeys(action.kind for action in self.computations))


def _refuse_torn_phases(g: int, phases: Sequence[_Phase]) -> None:
    seen: set[tuple[int, Kind]] = set()
    for phase in phases:
        for kind in phase.kinds:
            if (phase.ministage, kind) in seen:
                raise ScheduleError(
                    f"group {g} comes back to {kind.value} of ministage {phase.ministage}: "
                    "ZeRO 2 gathers a ministage once for all of its forward and once for all of its "
                    "backward; set zero to 0 or 1"
                )
            seen.add((phase.ministage, kind))


def _gather_once(phases: Sequence[_Phase]) -> None:
    """ZeRO 1: from before the first use until after the last, the next one during a first use."""
    first_use = {phase.ministage: phase for phase in reversed(phases)}
    last_use = {phase.ministage: phase for phase in phases}
    order = list(dict.fromkeys(phase.ministage for phase in phases))
    for i, ministage in enumerate(order):
        first_use[ministage].gathered = order[: i + 2] if i == 0 else order[i + 1 : i + 2]
        last_use[ministage].releases = True


def _gather_twice(phases: Sequence[_Phase]) -> None:
    """ZeRO 2: for each phase anew, the next phase's while this one computes."""
    for i, phase in enumerate(phases):
        phase.releases = True
        if i == 0 or phases[i - 1].ministage == phase.ministage:
            phase.gathered.append(phase.ministage)
        if i + 1 < len(phases) and phases[i + 1].ministage != phase.ministage:
            phase.gathered.append(phases[i + 1].ministage)


def _step(spec: ScheduleSpec, ministage: int) -> list[Action]:
    exchange = [Action(Kind.TIE_VALUE, ministage)] if ministage in spec.owners else []
    return [Action(Kind.STEP, ministage), *exchange]


def _end_of_step(spec: ScheduleSpec, g: int) -> list[Action]:
    """Deferred updates, then new values of borrowed weights (their owners step last)."""
    if not spec.has_backward:
        return []
    ministages = spec.plan.ministages_of_group(g)[::-1]
    actions: list[Action] = []
    if spec.defer_steps:
        actions.append(Action(Kind.NORM))
        for ministage in ministages:
            actions += _step(spec, ministage) if spec.trains[ministage] else []
    return actions + [
        Action(Kind.TIE_FETCH, ministage) for ministage in ministages if ministage in spec.borrowers
    ]
