"""From an order of computations to a whole schedule.

`build` decides the order of computations itself; here it is given, by a file of another system or a
rule of one, and gets what `build` would put around it: transfers, gathers, reductions, updates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import COMPUTE, SENDS, Action, Kind
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.lowering.build import RECEIVE_AHEAD
from zorselike.schedule.spec import Demands
from zorselike.schedule.transfers import NumberedMicrobatch, Transfer, match_rows, number_microbatches

# -- transfers ---------------------------------------------------------------------------------


def direction(kind: Kind) -> int:
    """Where the other end of a transfer is: 1 for the following ministage, -1 for the one before."""
    return 1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1


def pin_rows(plan: Plan, rank: int, transfer: Action) -> Action:
    """The transfer with the peer and the rows that the plan gives its microbatch."""
    assert transfer.ministage is not None and transfer.microbatch is not None
    (peer,) = plan.group_of(transfer.ministage + direction(transfer.kind)).flat_ranks
    rows = plan.microbatches_of_rank(rank)[transfer.microbatch]
    return replace(transfer, peer=peer, start=rows.start, stop=rows.stop)


def add_transfers(demands: Demands, lists: Mapping[int, Sequence[Action]]) -> dict[int, list[Action]]:
    """Puts sends right after their computation and receives some computations ahead of theirs.

    Args:
        lists: per rank, its computations in order.
    """
    transfers = find_transfers(demands, lists)
    channels: defaultdict[int, defaultdict[tuple[int, Kind], list[Action]]] = defaultdict(
        lambda: defaultdict(list)
    )
    sends: dict[int, list[list[Action]]] = {}
    for source, own in transfers.items():
        sends[source] = [[pair.send for pair in pairs] for pairs in own]
        for pair in chain.from_iterable(own):
            assert pair.send.peer is not None
            channels[pair.send.peer][source, pair.receive.kind].append(pair.receive)
    return {rank: _merge(own, sends[rank], channels[rank]) for rank, own in lists.items()}


class Pair(NamedTuple):
    """Both ends of a transfer."""

    send: Action
    receive: Action


def find_transfers(
    demands: Demands, lists: Mapping[int, Sequence[Action]]
) -> dict[int, list[tuple[Pair, ...]]]:
    """Per rank, for each of its computations, what leaves with its results."""
    by_row = [number_microbatches(group) for group in demands.plan.groups]
    starts = [[item.microbatch.start for item in items] for items in by_row]
    found: dict[int, list[tuple[Pair, ...]]] = {}
    for rank, own in lists.items():
        microbatches = demands.plan.microbatches_of_rank(rank)
        found[rank] = []
        for computation in own:
            assert computation.ministage is not None and computation.microbatch is not None
            target = _target_group(demands, computation)
            if target is None or computation.microbatch >= len(microbatches):
                found[rank].append(())
                continue
            item = NumberedMicrobatch(computation.microbatch, microbatches[computation.microbatch])
            transfers = match_rows(item, by_row[target], starts[target])
            found[rank].append(tuple(_pair(computation, transfer) for transfer in transfers))
    return found


def _target_group(demands: Demands, computation: Action) -> int | None:
    """Who gets a computation's results, if that is another group."""
    ministage = computation.ministage
    assert ministage is not None
    if computation.kind is Kind.B and ministage <= demands.lowest_backward:
        return None
    return demands.remote_neighbour(ministage, 1 if computation.kind is Kind.F else -1)


def _pair(computation: Action, transfer: Transfer) -> Pair:
    forward = computation.kind is Kind.F
    rows = (transfer.start, transfer.stop)
    assert computation.ministage is not None
    neighbour = computation.ministage + (1 if forward else -1)
    return Pair(
        Action(
            Kind.SEND_F if forward else Kind.SEND_B,
            computation.ministage,
            transfer.source_microbatch,
            transfer.target,
            *rows,
        ),
        Action(
            Kind.RECV_F if forward else Kind.RECV_B,
            neighbour,
            transfer.target_microbatch,
            transfer.source,
            *rows,
        ),
    )


def _merge(
    computations: Sequence[Action],
    sends: Sequence[Sequence[Action]],
    channels: Mapping[tuple[int, Kind], Sequence[Action]],
) -> list[Action]:
    """One rank's list; each channel holds what one sender sends, in its order, and is posted in it."""
    needs: defaultdict[tuple[Kind, int | None, int | None], list[tuple[tuple[int, Kind], int]]] = defaultdict(
        list
    )
    for channel, receives in channels.items():
        for index, receive in enumerate(receives):
            needs[receive.kind, receive.ministage, receive.microbatch].append((channel, index))
    num_posted: defaultdict[tuple[int, Kind], int] = defaultdict(int)
    actions: list[Action] = []
    for position, (computation, leaving) in enumerate(zip(computations, sends, strict=True)):
        for ahead in computations[position : position + RECEIVE_AHEAD + 1]:
            kind = Kind.RECV_F if ahead.kind is Kind.F else Kind.RECV_B
            for channel, index in needs.pop((kind, ahead.ministage, ahead.microbatch), ()):
                actions += channels[channel][num_posted[channel] : index + 1]
                num_posted[channel] = max(num_posted[channel], index + 1)
        actions.append(computation)
        actions += leaving
    return actions


# -- gathers, reductions, updates --------------------------------------------------------------


@dataclass
class _Phase:
    """Consecutive computations of one ministage in one direction, with their transfers."""

    ministage: int
    kind: Kind
    actions: list[Action] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    """Ministages to gather before it: its own if need be, then the next one, which is prefetched."""
    released: bool = False
    """Whether its ministage is freed after it."""


def add_surroundings(demands: Demands, rank: int, actions: Sequence[Action]) -> list[Action]:
    """Puts gathers, reductions, updates and exchanges of tied weights around one rank's work.

    Args:
        actions: the rank's computations and transfers in order.

    Raises:
        ScheduleError: with ZeRO 2, a ministage's forward or backward does not come in one piece.
    """
    group = demands.group_of_rank(rank)
    phases = _split_phases(actions)
    if group.zero == 1:
        _gather_once(phases)
    elif group.zero == 2:
        _refuse_torn_phases(rank, phases)
        _gather_twice(phases)
    last_backward = {phase.ministage: i for i, phase in enumerate(phases) if phase.kind is Kind.B}
    result: list[Action] = []
    for i, phase in enumerate(phases):
        done = last_backward.get(phase.ministage) == i and demands.trains[phase.ministage]
        result += [Action(Kind.UNSHARD, ministage) for ministage in phase.gathered]
        result += _reduce_microbatches(demands, rank, phase)
        if done and not group.reduces_per_microbatch:
            result.append(Action(Kind.REDUCE_GRAD, phase.ministage))
        if phase.released:
            result.append(Action(Kind.RESHARD, phase.ministage))
        if done:
            result += _update(demands, phase.ministage)
    return result + _end_of_step(demands, rank)


def _split_phases(actions: Sequence[Action]) -> list[_Phase]:
    """Cuts where ministage or direction change, behind the sends of the last computation."""
    phases: list[_Phase] = []
    pending: list[Action] = []
    for action in actions:
        pending.append(action)
        if action.kind in COMPUTE:
            assert action.ministage is not None
            if not phases or (phases[-1].ministage, phases[-1].kind) != (action.ministage, action.kind):
                phases.append(_Phase(action.ministage, action.kind))
        if phases and (action.kind in COMPUTE or action.kind in SENDS):
            phases[-1].actions += pending
            pending = []
    if phases:
        phases[-1].actions += pending
    return phases


def _refuse_torn_phases(rank: int, phases: Sequence[_Phase]) -> None:
    seen: set[tuple[int, Kind]] = set()
    for phase in phases:
        if (phase.ministage, phase.kind) in seen:
            raise ScheduleError(
                f"rank {rank} comes back to {phase.kind.value} of ministage {phase.ministage}: "
                "ZeRO 2 gathers a ministage once for all of its forward and once for all of its backward; "
                "set zero to 0 or 1"
            )
        seen.add((phase.ministage, phase.kind))


def _gather_once(phases: Sequence[_Phase]) -> None:
    """ZeRO 1: from before the first use until after the last, the next one during a first use."""
    first_use = {phase.ministage: phase for phase in reversed(phases)}
    last_use = {phase.ministage: phase for phase in phases}
    order = list(dict.fromkeys(phase.ministage for phase in phases))
    for i, ministage in enumerate(order):
        first_use[ministage].gathered = order[: i + 2] if i == 0 else order[i + 1 : i + 2]
        last_use[ministage].released = True


def _gather_twice(phases: Sequence[_Phase]) -> None:
    """ZeRO 2: for each phase anew, the next phase's while this one computes."""
    for i, phase in enumerate(phases):
        phase.released = True
        if i == 0 or phases[i - 1].ministage == phase.ministage:
            phase.gathered.append(phase.ministage)
        if i + 1 < len(phases) and phases[i + 1].ministage != phase.ministage:
            phase.gathered.append(phases[i + 1].ministage)


def _reduce_microbatches(demands: Demands, rank: int, phase: _Phase) -> list[Action]:
    """A phase's actions, with a reduction behind each backward if the plan reduces each microbatch."""
    group = demands.group_of_rank(rank)
    trains = phase.kind is Kind.B and demands.trains[phase.ministage]
    if not (trains and group.reduces_per_microbatch and group.zero != 3):
        return phase.actions
    result: list[Action] = []
    due: list[Action] = []
    for action in phase.actions:
        if action.kind not in SENDS:
            result += due
            due = []
        result.append(action)
        if action.kind is Kind.B:
            due = [Action(Kind.REDUCE_GRAD, action.ministage, action.microbatch)]
    return result + due


def _update(demands: Demands, ministage: int) -> list[Action]:
    exchange = [Action(Kind.TIE_GRAD, ministage)] if ministage in demands.tied else []
    return exchange + ([] if demands.defer_steps else _step(demands, ministage))


def _step(demands: Demands, ministage: int) -> list[Action]:
    exchange = [Action(Kind.TIE_VALUE, ministage)] if ministage in demands.owners else []
    return [Action(Kind.STEP, ministage), *exchange]


def _end_of_step(demands: Demands, rank: int) -> list[Action]:
    if not demands.has_backward:
        return []
    own = demands.plan.ministages_of_rank(rank)[::-1]
    actions: list[Action] = []
    if demands.defer_steps:
        actions.append(Action(Kind.NORM))
        for ministage in own:
            actions += _step(demands, ministage) if demands.trains[ministage] else []
    borrowed = [ministage for ministage in own if ministage in demands.borrowers]
    return actions + [Action(Kind.TIE_FETCH, ministage) for ministage in borrowed]
