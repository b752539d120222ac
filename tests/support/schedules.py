"""Random plans with random options of `build`, and a second opinion on whether lists of actions end."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from plans import random_plan, with_replicas

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import RECEIVES, SENDS, Action, Kind
from zorselike.schedule.orders.in_flight import order_in_flight
from zorselike.schedule.spec import ScheduleSpec

Lists = dict[int, list[Action]]


def random_spec(rng: random.Random, *, small: bool, replicas: bool = False) -> ScheduleSpec:
    """Of a valid plan of up to 6 groups of 8 ranks and 8 ministages (small: 3, 3 and 3; with tensor-parallel
    replicas up to 6 ranks)."""
    sizes = (3, 3, 3, 10) if small else (6, 8, 8, 24)
    max_groups, max_ranks, max_ministages, max_rows = sizes
    max_ranks = max(max_ranks, 6) if replicas else max_ranks
    plan = random_plan(
        rng,
        max_groups=max_groups,
        max_ranks_per_group=max_ranks,
        max_ministages_per_group=max_ministages,
        max_rows=max_rows,
        round_robin=rng.random() < 0.5,
    )
    return spec_of(rng, with_replicas(plan, rng) if replicas else plan)


def spec_of(rng: random.Random, plan: Plan) -> ScheduleSpec:
    """Of a plan, with random options."""
    masked = rng.random() < 0.4
    trainable = tuple(rng.random() < 0.6 for _ in plan.ministages) if masked else None
    trained = [i for i in range(plan.num_ministages) if trainable is None or trainable[i]]
    ties: set[tuple[int, int]] = set()
    if len(trained) > 1 and rng.random() < 0.4:
        for _ in range(rng.randint(1, 3)):
            owner, borrower = sorted(rng.sample(trained, 2))
            ties.add((owner, borrower))
    return ScheduleSpec(
        plan,
        trainable=trainable,
        ties=tuple(sorted(ties)),
        forward_only=rng.random() < 0.15,
        defer_steps=rng.random() < 0.3,
        masters=rng.random() < 0.5,
    )


def as_checked(spec: ScheduleSpec) -> ScheduleSpec:
    """The spec for which `check` accepts a list that keeps ministages gathered: ZeRO 1 for ZeRO 2.

    With several ministages a group such a list breaks one promise of ZeRO 2, that at most two ministages are
    gathered and one has whole gradients; all other promises are proven.
    """
    groups = tuple(replace(group, zero=1) if group.zero == 2 else group for group in spec.plan.groups)
    return replace(spec, plan=replace(spec.plan, groups=groups))


def count_in_flight(spec: ScheduleSpec) -> tuple[int, ...]:
    """Per group, how many microbatches of its ministages are in flight at most in the order of
    `order_in_flight`. Those of ministages below the lowest backward keep no activations."""
    counts = []
    for order in order_in_flight(spec):
        goes_back = [action for action in order if (action.ministage or 0) >= spec.lowest_backward]
        counts.append(max(accumulate(1 if a.kind is Kind.F else -1 for a in goes_back), default=0))
    return tuple(counts)


_Channel = tuple[int | None, int | None, str]
_Computation = tuple[int, Kind, int | None, int | None]


class NaiveRun:
    """Runs lists in random order, each action by its own meaning, knowing nothing of the checker.

    A send waits for its receive to be posted unless its edge is in `buffered`, or all buffer.
    """

    def __init__(
        self,
        plan: Plan,
        lists: Mapping[int, Sequence[Action]],
        ties: Sequence[tuple[int, int]],
        buffered: frozenset[tuple[int, int, str]] | None,
    ) -> None:
        self._plan = plan
        self._lists = lists
        self._ties = ties
        self._buffered = buffered
        self._at = dict.fromkeys(lists, 0)
        self._begun: dict[int, bool] = dict.fromkeys(lists, False)
        """Whether a rank stands at a collective and has told the others."""
        self._sent: Counter[_Channel] = Counter()
        self._posted: Counter[_Channel] = Counter()
        self._due: defaultdict[_Computation, list[tuple[_Channel, int]]] = defaultdict(list)
        """Per computation: the channels and how many of their transfers must have been sent."""
        self._joined: Counter[tuple[object, ...]] = Counter()
        self._gathers: Counter[tuple[int, int | None]] = Counter()

    def ends(self, rng: random.Random) -> bool:
        """Whether all ranks come to the end of their lists."""
        ranks = sorted(self._lists)
        moved = True
        while moved:
            moved = False
            rng.shuffle(ranks)
            for rank in ranks:
                moved |= self._move(rank, rng.randint(1, 5))
        return all(self._at[rank] == len(self._lists[rank]) for rank in ranks)

    def _move(self, rank: int, steps: int) -> bool:
        moved = False
        for _ in range(steps):
            if self._at[rank] == len(self._lists[rank]):
                break
            begun = self._begun[rank]
            if not self._passes(rank, self._lists[rank][self._at[rank]]):
                return moved or self._begun[rank] != begun
            self._at[rank] += 1
            self._begun[rank] = False
            moved = True
        return moved

    def _passes(self, rank: int, action: Action) -> bool:
        kind, ministage = action.kind, action.ministage
        group = self._plan.group_of_rank[rank]
        size = len(self._plan.groups[group].flat_ranks)
        if kind in RECEIVES:
            channel = (action.peer, rank, "F" if kind is Kind.RECV_F else "B")
            self._posted[channel] += 1
            compute = Kind.F if kind is Kind.RECV_F else Kind.B
            self._due[rank, compute, ministage, action.microbatch].append((channel, self._posted[channel]))
            return True
        if kind in SENDS:
            channel = (rank, action.peer, "F" if kind is Kind.SEND_F else "B")
            buffers = self._buffered is None or channel in self._buffered
            if not buffers and self._posted[channel] <= self._sent[channel]:
                return False
            self._sent[channel] += 1
            return True
        if kind is Kind.UNSHARD:
            self._gathers[rank, ministage] += 1
            self._joined["gather", ministage, self._gathers[rank, ministage]] += 1
            return True
        if kind in (Kind.F, Kind.B, Kind.RESHARD):
            turn = self._gathers[rank, ministage]
            if turn and self._joined["gather", ministage, turn] < size:
                return False
            for channel, count in self._due[rank, kind, ministage, action.microbatch]:
                if self._sent[channel] < count:
                    return False
            if kind is Kind.RESHARD:
                return True
            if self._plan.groups[group].zero == 3:
                return self._meets(rank, action, group, size)
            replica = self._plan.replica_of(rank)
            return len(replica.ranks) == 1 or self._meets(rank, action, replica, len(replica.ranks))
        return self._passes_collective(rank, action, group, size)

    def _passes_collective(self, rank: int, action: Action, group: int, size: int) -> bool:
        if action.kind is Kind.REDUCE_GRAD:
            return self._meets(rank, action, group, size)
        if action.kind is Kind.NORM:
            return self._meets(rank, action, None, self._plan.num_ranks)
        if action.kind is Kind.TIE_VALUE:
            self._joined["value", action.ministage] += 1
        if action.kind is Kind.TIE_FETCH:
            owners = [owner for owner, borrower in self._ties if borrower == action.ministage]
            return all(self._joined["value", owner] == self._size(owner) for owner in owners)
        if action.kind is Kind.TIE_GRAD:
            if not self._begun[rank]:
                self._begun[rank] = True
                self._joined["tie", action.ministage] += 1
            borrowers = [borrower for owner, borrower in self._ties if owner == action.ministage]
            return all(self._joined["tie", borrower] == self._size(borrower) for borrower in borrowers)
        return True

    def _size(self, ministage: int) -> int:
        return len(self._plan.group_of(ministage).flat_ranks)

    def _meets(self, rank: int, action: Action, group: object, size: int) -> bool:
        key = (group, action.text)
        if not self._begun[rank]:
            self._begun[rank] = True
            self._joined[key] += 1
        return self._joined[key] == size
