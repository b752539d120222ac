"""From a plan to what every rank does, in order (DESIGN section 6, Zorse 4.1).

Forward: all microbatches of a ministage, then the group's next ministage. Backward: the
same in reverse, newest microbatch first. With ZeRO 2 the next ministage is gathered while
the current one computes, so two are resident at most; each reduces once and steps as soon
as its own backward is done.

A plan with a single ministage is gradient accumulation: there is no other ministage to free room
for and no other group to feed, so each microbatch goes forward and at once backward, and the
activations of one are held. Parameters of ZeRO 1 and 2 are gathered once for the step.

So they are where the plan bounds microbatches in flight: there each group has one ministage, and
`zorselike/schedule/orders/in_flight.py` says in which order it goes forward and backward.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.lowering.host_copies import add_host_copies
from zorselike.schedule.orders.in_flight import order_in_flight
from zorselike.schedule.transfers import Transfer, match_rows, number_microbatches

RECEIVE_AHEAD = 2
"""Receives are posted this many computations before the one that needs them: enough to keep a
link busy during a computation without holding a whole ministage's inputs early."""

Tie = tuple[int, int]
"""Ministages of a tied weight: its owner (the lowest) and one borrower."""


@dataclass(frozen=True)
class _Phase:
    """Computations of one ministage for which its parameters are gathered once."""

    ministage: int
    order: tuple[tuple[Kind, int], ...]
    """What is computed in turn, with the number of the microbatch: all forward, all backward, or both."""

    @property
    def is_forward(self) -> bool:
        return self.order[0][0] is Kind.F

    @property
    def is_backward(self) -> bool:
        return self.order[-1][0] is Kind.B


class _Computation(NamedTuple):
    """One microbatch of a phase; the key under which its transfers are found."""

    ministage: int
    kind: Kind
    microbatch: int


@dataclass
class _Wiring:
    """Every transfer of a step, found by its sender and by its receiver."""

    sends: dict[tuple[int, _Computation], list[Action]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[tuple[int, _Computation], list[tuple[Kind, int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Per receiver and computation: positions in its channels, `(direction, source, index)`."""
    channels: dict[tuple[int, Kind, int], list[Action]] = field(default_factory=lambda: defaultdict(list))
    """Per receiver, direction and source: the posts in the order in which the sender sends."""


def build(
    plan: Plan,
    *,
    trainable: Sequence[bool] | None = None,
    ties: Sequence[Tie] = (),
    forward_only: bool = False,
    defer_steps: bool = False,
    masters: bool = False,
) -> dict[int, list[Action]]:
    """The actions of every rank for one optimizer step, or one evaluation if `forward_only`.

    `trainable[i]` says whether ministage `i` has a parameter that trains (default: all have):
    ministages below the lowest such one run no backward, frozen ones above it neither reduce
    nor step. `defer_steps` moves all updates behind the global gradient norm. `masters` says that
    updates change fp32 master weights and overwrite the shards, so that a step need not load them.
    """
    return _Builder(plan, trainable, ties, forward_only, defer_steps, masters).build()


class _Builder:
    def __init__(
        self,
        plan: Plan,
        trainable: Sequence[bool] | None,
        ties: Sequence[Tie],
        forward_only: bool,
        defer_steps: bool,
        masters: bool,
    ) -> None:
        self._plan = plan
        self._masters = masters
        self._trainable = (True,) * plan.num_ministages if trainable is None else tuple(trainable)
        self._ties = () if forward_only else tuple(sorted(set(ties)))
        self._forward_only = forward_only
        self._defer_steps = defer_steps
        trained = [i for i, trains in enumerate(self._trainable) if trains]
        self._lowest_backward = plan.num_ministages if forward_only or not trained else trained[0]
        self._has_backward = self._lowest_backward < plan.num_ministages
        self._phases = self._list_phases()

    def build(self) -> dict[int, list[Action]]:
        wiring = self._wire()
        return {
            rank: add_host_copies(
                self._plan,
                rank,
                self._list_actions(rank, wiring),
                lowest_backward=self._lowest_backward,
                masters=self._masters,
            )
            for rank in sorted(self._plan.group_of_rank)
        }

    # -- what is computed, in which order -------------------------------------------------

    def _list_phases(self) -> list[list[_Phase]]:
        """Of every group, in order."""
        if self._plan.bounds_in_flight and self._has_backward:
            orders = order_in_flight(self._plan, lowest_backward=self._lowest_backward)
            return [[_Phase(self._plan.ministages_of_group(g)[0], order)] for g, order in enumerate(orders)]
        return [self._list_phases_of(g) for g in range(len(self._plan.groups))]

    def _list_phases_of(self, g: int) -> list[_Phase]:
        own = self._plan.ministages_of_group(g)
        numbers = range(self._plan.groups[g].max_microbatches)
        if self._plan.num_ministages == 1 and self._has_backward:
            return [_Phase(0, tuple((kind, number) for number in numbers for kind in (Kind.F, Kind.B)))]
        forward = tuple((Kind.F, number) for number in numbers)
        newest_first = tuple((Kind.B, number) for number in reversed(numbers))
        backward = [_Phase(i, newest_first) for i in reversed(own) if i >= self._lowest_backward]
        return [_Phase(i, forward) for i in own] + backward

    def _computations(self, rank: int, phase: _Phase) -> list[_Computation]:
        """The rank's part of a phase, in order."""
        num_computed = self._num_computed(rank)
        return [
            _Computation(phase.ministage, kind, number)
            for kind, number in phase.order
            if number < num_computed
        ]

    def _num_computed(self, rank: int) -> int:
        """How many microbatches of a ministage a rank computes: its own, and with ZeRO 3 dummies up to the
        most of its group."""
        group = self._plan.groups[self._plan.group_of_rank[rank]]
        return group.max_microbatches if group.zero == 3 else len(group.microbatches_by_rank[rank])

    # -- transfers -------------------------------------------------------------------------

    def _wire(self) -> _Wiring:
        """Lays every transfer in the order in which its sender computes."""
        wiring = _Wiring()
        matches = _Matches(self._plan)
        for g, phases in enumerate(self._phases):
            for phase in phases:
                neighbours = self._remote_neighbours(phase.ministage)
                for rank in self._plan.groups[g].flat_ranks if neighbours else ():
                    for computation in self._computations(rank, phase):
                        neighbour = neighbours.get(computation.kind)
                        if neighbour is not None:
                            target = self._plan.ministages[neighbour].group
                            found = matches.find(g, target).get((rank, computation.microbatch), ())
                            _lay(wiring, rank, computation, neighbour, found)
        return wiring

    def _remote_neighbours(self, ministage: int) -> dict[Kind, int]:
        """The ministages of other groups that its results go to, forward and backward."""
        neighbours = {Kind.F: ministage + 1}
        if ministage > self._lowest_backward:
            neighbours[Kind.B] = ministage - 1
        own = self._plan.ministages[ministage].group
        return {
            kind: neighbour
            for kind, neighbour in neighbours.items()
            if neighbour < self._plan.num_ministages and self._plan.ministages[neighbour].group != own
        }

    # -- one rank's list -------------------------------------------------------------------

    def _list_actions(self, rank: int, wiring: _Wiring) -> list[Action]:
        g = self._plan.group_of_rank[rank]
        phases = self._phases[g]
        num_computed = self._num_computed(rank)
        make_posts = _PostsInFlight if self._plan.bounds_in_flight else _Posts
        posts = make_posts(rank, [c for phase in phases for c in self._computations(rank, phase)], wiring)
        actions: list[Action] = []
        for position, phase in enumerate(phases):
            following = phases[position + 1] if position + 1 < len(phases) else None
            actions += self._gathers_before(g, position, phase, following)
            reduces_each = self._reduces_each(g, phase)
            for kind, number in phase.order:
                if number < num_computed:
                    actions += posts.due()
                    actions.append(Action(kind, phase.ministage, number))
                    computation = _Computation(phase.ministage, kind, number)
                    actions += wiring.sends.get((rank, computation), [])
                if reduces_each and kind is Kind.B:
                    actions.append(Action(Kind.REDUCE_GRAD, phase.ministage, number))
            actions += self._after_phase(rank, phase, following)
        return actions + self._end_of_step(g)

    def _gathers_before(self, g: int, position: int, phase: _Phase, following: _Phase | None) -> list[Action]:
        """The first gather of the step, and ahead of each phase that of the next one."""
        zero = self._plan.groups[g].zero
        if zero not in (1, 2):
            return []
        gathers = [Action(Kind.UNSHARD, phase.ministage)] if position == 0 else []
        moves_on = following is not None and following.ministage != phase.ministage
        if following is not None and moves_on and (zero == 2 or following.is_forward):
            gathers.append(Action(Kind.UNSHARD, following.ministage))
        return gathers

    def _reduces_each(self, g: int, phase: _Phase) -> bool:
        """Whether a reduction of its own follows each backward, which ranks with fewer join; with ZeRO 3
        a backward has it inside."""
        group = self._plan.groups[g]
        trains = phase.is_backward and self._trainable[phase.ministage]
        return trains and group.zero != 3 and group.reduces_per_microbatch

    def _after_phase(self, rank: int, phase: _Phase, following: _Phase | None) -> list[Action]:
        g = self._plan.group_of_rank[rank]
        group = self._plan.groups[g]
        ministage = phase.ministage
        trains = phase.is_backward and self._trainable[ministage]
        actions: list[Action] = []
        if trains and not group.reduces_per_microbatch:
            actions.append(Action(Kind.REDUCE_GRAD, ministage))
        is_last_use = phase.is_backward or ministage < self._lowest_backward
        if group.zero == 2 or (group.zero == 1 and is_last_use):
            actions.append(Action(Kind.RESHARD, ministage))
        if trains:
            if any(ministage in tie for tie in self._ties):
                actions.append(Action(Kind.TIE_GRAD, ministage))
            if not self._defer_steps:
                actions += self._step(ministage)
        if group.zero == 2 and following is not None and following.ministage == ministage:
            actions.append(Action(Kind.UNSHARD, ministage))
        return actions

    def _step(self, ministage: int) -> list[Action]:
        owns = any(owner == ministage for owner, _ in self._ties)
        return [Action(Kind.STEP, ministage)] + ([Action(Kind.TIE_VALUE, ministage)] if owns else [])

    def _end_of_step(self, g: int) -> list[Action]:
        """Deferred updates, then new values of borrowed weights (their owners step last)."""
        if not self._has_backward:
            return []
        own = self._plan.ministages_of_group(g)
        actions: list[Action] = []
        if self._defer_steps:
            actions.append(Action(Kind.NORM))
            for ministage in reversed(own):
                if self._trainable[ministage]:
                    actions += self._step(ministage)
        borrowers = {borrower for _, borrower in self._ties}
        actions += [Action(Kind.TIE_FETCH, i) for i in reversed(own) if i in borrowers]
        return actions


class _Matches:
    """Where the rows of each microbatch go, from each group to each that takes its results."""

    def __init__(self, plan: Plan) -> None:
        self._by_row = [number_microbatches(group) for group in plan.groups]
        self._starts = [[item.microbatch.start for item in items] for items in self._by_row]
        self._found: dict[tuple[int, int], dict[tuple[int, int], list[Transfer]]] = {}

    def find(self, source: int, target: int) -> Mapping[tuple[int, int], list[Transfer]]:
        """Transfers from group to group by rank and microbatch, dummies not among them."""
        if (source, target) not in self._found:
            self._found[source, target] = {
                (item.microbatch.rank, item.number): match_rows(
                    item, self._by_row[target], self._starts[target]
                )
                for item in self._by_row[source]
            }
        return self._found[source, target]


def _lay(
    wiring: _Wiring, rank: int, computation: _Computation, neighbour: int, transfers: Sequence[Transfer]
) -> None:
    """Enters what a computation sends, at its sender and in its receivers' channels."""
    kind = computation.kind
    is_forward = kind is Kind.F
    send_kind, receive_kind = (Kind.SEND_F, Kind.RECV_F) if is_forward else (Kind.SEND_B, Kind.RECV_B)
    sends = wiring.sends[rank, computation]
    for own in transfers:
        number, start, stop = own.target_microbatch, own.start, own.stop
        sends.append(
            Action(send_kind, computation.ministage, computation.microbatch, own.target, start, stop)
        )
        channel = wiring.channels[own.target, kind, rank]
        needed_by = _Computation(neighbour, kind, number)
        wiring.receives[own.target, needed_by].append((kind, rank, len(channel)))
        channel.append(Action(receive_kind, neighbour, number, rank, start, stop))


class _Posts:
    """Hands out a rank's receives a fixed number of computations early, each channel in its
    sender's order (there are no tags to match by on NCCL)."""

    def __init__(self, rank: int, computations: Sequence[_Computation], wiring: _Wiring) -> None:
        self._rank = rank
        self._computations = computations
        self._wiring = wiring
        self._next_computation = 0
        self._posted: dict[tuple[Kind, int], int] = defaultdict(int)

    def due(self) -> list[Action]:
        """What is to be posted before the next computation."""
        here = self._next_computation
        self._next_computation += 1
        posts: list[Action] = []
        for computation in self._look_ahead(here):
            for kind, source, index in self._wiring.receives.get((self._rank, computation), ()):
                num_posted = self._posted[kind, source]
                if index >= num_posted:
                    channel = self._wiring.channels[self._rank, kind, source]
                    posts += channel[num_posted : index + 1]
                    self._posted[kind, source] = index + 1
        return posts

    def _look_ahead(self, here: int) -> Sequence[_Computation]:
        """Computations whose receives are to be posted by now and may not be yet."""
        return self._computations[0 if here == 0 else here + RECEIVE_AHEAD : here + RECEIVE_AHEAD + 1]


class _PostsInFlight(_Posts):
    """The same where forwards and backwards alternate: so many computations of each kind early, and what a
    microbatch's backward needs right after its forward. Else a group waits to send a forward that the next
    one takes only once it has sent a backward that the first one does not take yet."""

    def __init__(self, rank: int, computations: Sequence[_Computation], wiring: _Wiring) -> None:
        super().__init__(rank, computations, wiring)
        self._to_come = {kind: deque(c for c in computations if c.kind is kind) for kind in (Kind.F, Kind.B)}
        """By kind, the computations whose receives were not looked at yet."""
        self._num_left = {kind: len(own) for kind, own in self._to_come.items()}
        """By kind, the computations that are not done."""

    def _look_ahead(self, here: int) -> Sequence[_Computation]:
        found: list[_Computation] = []
        if here and self._computations[here - 1].kind is Kind.F:
            found.append(self._computations[here - 1]._replace(kind=Kind.B))
        now = self._computations[here].kind
        for kind, own in self._to_come.items():
            ahead = RECEIVE_AHEAD + (kind is now)
            while own and self._num_left[kind] - len(own) < ahead:
                found.append(own.popleft())
        self._num_left[now] -= 1
        return found
