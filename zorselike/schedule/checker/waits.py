"""What every action waits for, as events: the precedence graph of a schedule.

An event is something that some actions bring about together: the start of a collective is
brought about by all ranks of a group, a computation of several ranks by all of their replica, a sent slice by
one rank. An action first waits for its `before` events, then arrives at its own, then waits for its `after`
events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from zorselike.schedule.actions import COMPUTE, NEEDED_BY, RECEIVES, Kind
from zorselike.schedule.checker.channels import Channel, Match
from zorselike.schedule.checker.steps import NONE, Step
from zorselike.schedule.spec import ScheduleSpec

Place = tuple[int, int]
"""A rank and a position in its list."""


class Waits:
    """Events by number; per rank and position, which of them the action waits for and brings about."""

    def __init__(self, steps: Mapping[int, Sequence[Step]]) -> None:
        lengths = {rank: len(rank_steps) for rank, rank_steps in steps.items()}
        self.members: list[list[Place]] = []
        """Per event: the actions that must all arrive."""
        self.before: dict[int, list[tuple[int, ...]]] = {r: [()] * n for r, n in lengths.items()}
        self.arrives = {rank: [NONE] * length for rank, length in lengths.items()}
        """The event that the action brings about, or `NONE`."""
        self.after: dict[int, list[tuple[int, ...]]] = {r: [()] * n for r, n in lengths.items()}
        self.posted = {rank: [NONE] * length for rank, length in lengths.items()}
        """For a send, the event of its receive being posted: it waits for that where nothing buffers."""

    def add_event(self, *members: Place) -> int:
        self.members.append([])
        event = len(self.members) - 1
        for member in members:
            self.join(event, member)
        return event

    def join(self, event: int, member: Place) -> None:
        rank, position = member
        self.members[event].append(member)
        self.arrives[rank][position] = event


def find_waits(
    spec: ScheduleSpec, steps: Mapping[int, Sequence[Step]], matches: Mapping[Channel, Sequence[Match]]
) -> Waits:
    """The precedence graph of a schedule whose transfers match and whose groups agree on collectives."""
    waits = Waits(steps)
    sent = _add_transfers(waits, matches)
    shared = _Shared(spec, waits)
    for rank, rank_steps in steps.items():
        _add_rank(spec, waits, shared, sent, rank, rank_steps)
    _add_ties(spec, waits, shared, steps)
    return waits


def _add_transfers(waits: Waits, matches: Mapping[Channel, Sequence[Match]]) -> dict[Place, int]:
    """Adds the events of all transfers; returns for each receive the event of its rows being sent."""
    sent: dict[Place, int] = {}
    for channel, pairs in matches.items():
        for pair in pairs:
            sent[channel.target, pair.received] = waits.add_event((channel.source, pair.sent))
            waits.posted[channel.source][pair.sent] = waits.add_event((channel.target, pair.received))
    return sent


class _Shared:
    """Events that several ranks bring about together, found by what names them."""

    def __init__(self, spec: ScheduleSpec, waits: Waits) -> None:
        self._spec = spec
        self._waits = waits
        self._events: dict[tuple[int, int, int, Kind, int, int], int] = {}

    def join(self, step: Step, member: Place, *, turn: int = 0, replica: int = NONE) -> int:
        """The member's arrival at its group's (or, for NORM, the world's) `turn`-th event of that name; with
        the first rank of a replica, at its."""
        group = NONE if step.kind is Kind.NORM else self._spec.plan.group_of_rank[member[0]]
        key = (group, replica, turn, step.kind, step.ministage, step.microbatch)
        if key not in self._events:
            self._events[key] = self._waits.add_event()
        self._waits.join(self._events[key], member)
        return self._events[key]

    def find(self, kind: Kind, ministage: int) -> int:
        """The event of a whole ministage, which exists."""
        group = self._spec.plan.ministages[ministage].group
        return self._events[group, NONE, 0, kind, ministage, NONE]


_RENDEZVOUS = frozenset({Kind.REDUCE_GRAD, Kind.NORM})
_TIES = frozenset({Kind.TIE_GRAD, Kind.TIE_VALUE})


def _add_rank(
    spec: ScheduleSpec,
    waits: Waits,
    shared: _Shared,
    sent: Mapping[Place, int],
    rank: int,
    steps: Sequence[Step],
) -> None:
    joins_group = spec.group_of_rank(rank).zero == 3
    replica = spec.plan.replica_of(rank)
    joins_computations = joins_group or replica.degree > 1
    of_replica = NONE if joins_group else replica.first
    before, after = waits.before[rank], waits.after[rank]
    incoming: defaultdict[tuple[Kind, int, int], list[int]] = defaultdict(list)
    num_gathers: defaultdict[int, int] = defaultdict(int)
    gathering: dict[int, int] = {}
    for position, step in enumerate(steps):
        kind, ministage = step.kind, step.ministage
        if kind in RECEIVES:
            incoming[NEEDED_BY[kind], ministage, step.microbatch].append(sent[rank, position])
        elif kind is Kind.UNSHARD:
            gathering[ministage] = shared.join(step, (rank, position), turn=num_gathers[ministage])
            num_gathers[ministage] += 1
        elif kind in COMPUTE:
            needed = incoming.pop((kind, ministage, step.microbatch), [])
            if ministage in gathering:
                needed.append(gathering.pop(ministage))
            before[position] = tuple(needed)
            if joins_computations:
                after[position] = (shared.join(step, (rank, position), replica=of_replica),)
        elif kind in _RENDEZVOUS:
            after[position] = (shared.join(step, (rank, position)),)
        elif kind in _TIES:
            shared.join(step, (rank, position))
        elif kind is Kind.RESHARD and ministage in gathering:
            before[position] = (gathering.pop(ministage),)


def _add_ties(spec: ScheduleSpec, waits: Waits, shared: _Shared, steps: Mapping[int, Sequence[Step]]) -> None:
    """An owner's TIE_GRAD waits for its borrowers' ones, a borrower's TIE_FETCH for its owners' values."""
    if spec.forward_only:
        return
    needed: defaultdict[tuple[Kind, int], list[int]] = defaultdict(list)
    for owner, borrower in spec.ties:
        needed[Kind.TIE_GRAD, owner].append(shared.find(Kind.TIE_GRAD, borrower))
        needed[Kind.TIE_FETCH, borrower].append(shared.find(Kind.TIE_VALUE, owner))
    for rank, rank_steps in steps.items():
        for position, step in enumerate(rank_steps):
            if (step.kind, step.ministage) in needed:
                waits.after[rank][position] = tuple(needed[step.kind, step.ministage])
