"""From a plan to what every rank does, in order (DESIGN section 6, Zorse 4.1).

Forward: all microbatches of a ministage, then the group's next ministage. Backward: the
same in reverse, newest microbatch first. With ZeRO 2 the next ministage is gathered while
the current one computes, so two are resident at most; each reduces once and steps as soon
as its own backward is done.

A plan with a single ministage is gradient accumulation: there is no other ministage to free room
for and no other group to feed, so each microbatch goes forward and at once backward, and the
activations of one are held. Parameters of ZeRO 1 and 2 are gathered once for the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.offloading import add_host_copies
from zorselike.schedule.transfers import Transfer, match_rows, number_microbatches

RECEIVE_AHEAD = 2
"""Receives are posted this many computations before the one that needs them: enough to keep a
link busy during a computation without holding a whole ministage's inputs early."""

Tie = tuple[int, int]
"""Ministages of a tied weight: its owner (the lowest) and one borrower."""


@dataclass(frozen=True)
class _Phase:
    """All microbatches of one ministage: forward, backward, or each forward and at once backward."""

    ministage: int
    kinds: tuple[Kind, ...]

    @property
    def is_forward(self) -> bool:
        return Kind.F in self.kinds

    @property
    def is_backward(self) -> bool:
        return Kind.B in self.kinds

    def order(self, num_microbatches: int) -> range:
        """The microbatches in turn; backwards alone take the newest first."""
        return range(num_microbatches) if self.is_forward else range(num_microbatches - 1, -1, -1)


@dataclass(frozen=True)
class _Computation:
    """One microbatch of a phase; the key under which its transfers are found."""

    ministage: int
    kind: Kind
    microbatch: int


@dataclass
class _Wiring:
    """Every transfer of a step, found by its sender and by its receiver."""

    sends: dict[tuple[int, _Computation], list[Action]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[tuple[int, _Computation], list[tuple[str, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Per receiver and computation: positions in its channels, `(direction + source, index)`."""
    channels: dict[tuple[int, str], list[Action]] = field(default_factory=lambda: defaultdict(list))
    """Per receiver and `direction + source`: the posts in the order in which the sender sends."""


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

    def _phases(self, group: int) -> list[_Phase]:
        own = self._plan.ministages_of_group(group)
        if self._plan.num_ministages == 1 and self._has_backward:
            return [_Phase(0, (Kind.F, Kind.B))]
        forward = [_Phase(i, (Kind.F,)) for i in own]
        backward = [_Phase(i, (Kind.B,)) for i in reversed(own) if i >= self._lowest_backward]
        return forward + backward

    def _computations(self, rank: int, phase: _Phase) -> list[_Computation]:
        """The rank's part of a phase, in order."""
        group = self._plan.groups[self._plan.group_of_rank[rank]]
        numbers = phase.order(group.max_microbatches)
        return [c for number in numbers for c in self._computations_of(rank, phase, number)]

    def _computations_of(self, rank: int, phase: _Phase, number: int) -> list[_Computation]:
        """Those of one microbatch: none past the rank's last one, but with ZeRO 3 dummies."""
        group = self._plan.groups[self._plan.group_of_rank[rank]]
        if group.zero != 3 and number >= len(group.microbatches_by_rank[rank]):
            return []
        return [_Computation(phase.ministage, kind, number) for kind in phase.kinds]

    # -- transfers -------------------------------------------------------------------------

    def _wire(self) -> _Wiring:
        """Lays every transfer in the order in which its sender computes."""
        wiring = _Wiring()
        by_row = [number_microbatches(group) for group in self._plan.groups]
        starts = [[item.microbatch.start for item in items] for items in by_row]
        outgoing: dict[tuple[int, int], dict[tuple[int, int], list[Transfer]]] = {}
        for g in range(len(self._plan.groups)):
            phases = self._phases(g)
            for phase in phases:
                neighbour = phase.ministage + (1 if phase.is_forward else -1)
                if not self._crosses(phase, neighbour):
                    continue
                target_group = self._plan.ministages[neighbour].group
                if (g, target_group) not in outgoing:
                    outgoing[g, target_group] = {
                        (item.microbatch.rank, item.number): match_rows(
                            item, by_row[target_group], starts[target_group]
                        )
                        for item in by_row[g]
                    }
                for rank in self._plan.groups[g].flat_ranks:
                    for computation in self._computations(rank, phase):
                        transfers = outgoing[g, target_group].get((rank, computation.microbatch), [])
                        for transfer in transfers:
                            _lay(wiring, computation, neighbour, transfer)
        return wiring

    def _crosses(self, phase: _Phase, neighbour: int) -> bool:
        """Whether a phase's results go to another group."""
        if not 0 <= neighbour < self._plan.num_ministages:
            return False
        if phase.is_backward and neighbour < self._lowest_backward:
            return False
        return self._plan.ministages[neighbour].group != self._plan.ministages[phase.ministage].group

    # -- one rank's list -------------------------------------------------------------------

    def _list_actions(self, rank: int, wiring: _Wiring) -> list[Action]:
        g = self._plan.group_of_rank[rank]
        phases = self._phases(g)
        posts = _Posts(rank, [c for phase in phases for c in self._computations(rank, phase)], wiring)
        actions: list[Action] = []
        for position, phase in enumerate(phases):
            following = phases[position + 1] if position + 1 < len(phases) else None
            actions += self._gathers_before(g, position, phase, following)
            for number in phase.order(self._plan.groups[g].max_microbatches):
                for computation in self._computations_of(rank, phase, number):
                    actions += posts.due()
                    actions.append(Action(computation.kind, phase.ministage, number))
                    actions += wiring.sends.get((rank, computation), [])
                if self._reduces_each(g, phase):
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
        """Whether a reduction of its own follows each microbatch, which ranks with fewer join; with ZeRO 3
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


def _lay(wiring: _Wiring, computation: _Computation, neighbour: int, transfer: Transfer) -> None:
    """Enters one transfer at its sender's computation and in its receiver's channel."""
    is_forward = computation.kind is Kind.F
    rows = (transfer.start, transfer.stop)
    send_kind, receive_kind = (Kind.SEND_F, Kind.RECV_F) if is_forward else (Kind.SEND_B, Kind.RECV_B)
    send = Action(send_kind, computation.ministage, computation.microbatch, transfer.target, *rows)
    post = Action(receive_kind, neighbour, transfer.target_microbatch, transfer.source, *rows)
    wiring.sends[transfer.source, computation].append(send)
    channel_name = f"{computation.kind.value}{transfer.source}"
    channel = wiring.channels[transfer.target, channel_name]
    needed_by = _Computation(neighbour, computation.kind, transfer.target_microbatch)
    wiring.receives[transfer.target, needed_by].append((channel_name, len(channel)))
    channel.append(post)


class _Posts:
    """Hands out a rank's receives a fixed number of computations early, each channel in its
    sender's order (there are no tags to match by on NCCL)."""

    def __init__(self, rank: int, computations: Sequence[_Computation], wiring: _Wiring) -> None:
        self._rank = rank
        self._computations = computations
        self._wiring = wiring
        self._next_computation = 0
        self._next_posted = 0
        self._posted: dict[str, int] = defaultdict(int)

    def due(self) -> list[Action]:
        """What is to be posted before the next computation."""
        horizon = min(self._next_computation + RECEIVE_AHEAD, len(self._computations) - 1)
        self._next_computation += 1
        posts: list[Action] = []
        for position in range(self._next_posted, horizon + 1):
            needed = self._wiring.receives.get((self._rank, self._computations[position]), [])
            for channel_name, index in needed:
                channel = self._wiring.channels[self._rank, channel_name]
                posts += channel[self._posted[channel_name] : index + 1]
                self._posted[channel_name] = max(self._posted[channel_name], index + 1)
        self._next_posted = max(self._next_posted, horizon + 1)
        return posts
