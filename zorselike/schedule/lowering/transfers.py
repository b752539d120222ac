"""Sends right after the computation that they follow, receives some computations ahead of theirs, but behind
all that their senders wait for (`reach.py`).

A pass over an order: where each rank's transfers stand among its computations. A channel, from one rank
to another in one direction, is posted in its sender's order: there are no tags to match by on NCCL.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.contract import RECEIVES_AHEAD
from zorselike.schedule.lowering.reach import find_reach
from zorselike.schedule.orders.order import Around, Order
from zorselike.schedule.spec import ScheduleSpec
from zorselike.schedule.transfers import list_transfers


@dataclass
class _Channel:
    """Receives of one rank from one other in one direction, in the sender's order."""

    receives: list[Action] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    """Per receive, the last computation of the rank's group that its sender waits for; these never fall."""
    num_posted: int = 0

    def post(self, index: int) -> list[Action]:
        """What is to be posted for the receive at `index` to be so."""
        posts = self.receives[self.num_posted : index + 1]
        self.num_posted = max(self.num_posted, index + 1)
        return posts


def place_transfers(
    spec: ScheduleSpec, order: Order, ranks: Collection[int] | None = None
) -> dict[int, list[Around]]:
    """Per rank that has any, or of those given, the transfers around each computation of its group."""
    ranks = spec.plan.group_of_rank.keys() if ranks is None else ranks
    group_of_rank, computations = spec.plan.group_of_rank, order.computations
    positions = [
        {(_RECEIVES[a.kind], a.ministage, a.microbatch): position for position, a in enumerate(in_order)}
        for in_order in computations
    ]
    reach = find_reach(spec, computations)
    around: dict[int, list[Around]] = {}
    channels: defaultdict[tuple[int, int, Kind], _Channel] = defaultdict(_Channel)
    needs: defaultdict[int, defaultdict[int, list[tuple[_Channel, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for source, target, position, send, receive in list_transfers(spec, computations, ranks):
        for rank in (source, target):
            if rank not in around and rank in ranks:
                around[rank] = [Around([], []) for _ in computations[group_of_rank[rank]]]
        if source in ranks:
            around[source][position].after.append(send)
        if target not in ranks:
            continue
        channel = channels[target, source, receive.kind]
        needed_at = positions[group_of_rank[target]].get(
            (receive.kind, receive.ministage, receive.microbatch)
        )
        if needed_at is not None:
            needs[target][needed_at].append((channel, len(channel.receives)))
        channel.receives.append(receive)
        channel.reached.append(reach[group_of_rank[source]][position][group_of_rank[target]])
    for rank, needed in needs.items():
        in_order = computations[group_of_rank[rank]]
        num_computed = spec.num_computed(rank)
        computed = [p for p, a in enumerate(in_order) if (a.microbatch or 0) < num_computed]
        waiting: defaultdict[int, list[tuple[_Channel, int]]] = defaultdict(list)
        for position, ahead in zip(computed, _look_ahead(in_order, computed, order.alternating), strict=True):
            posts = around[rank][position].before
            for channel, index in (*waiting[position], *(one for p in ahead for one in needed.get(p, ()))):
                if channel.reached[index] < position:
                    posts += channel.post(index)
                else:
                    after = bisect_right(computed, channel.reached[index])
                    waiting[computed[after]].append((channel, index))
    return around


_RECEIVES = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}


def _look_ahead(
    computations: Sequence[Action], computed: Sequence[int], alternating: Collection[int]
) -> Iterator[Sequence[int]]:
    """For each position that a rank computes, those whose receives are posted by then, if not before."""
    apart = [p for p in computed if computations[p].ministage in alternating]
    by_kind = _look_ahead_by_kind(computations, apart)
    for here, position in enumerate(computed):
        ahead = computed[here : here + RECEIVES_AHEAD + 1]
        yield [*next(by_kind), *ahead] if computations[position].ministage in alternating else ahead


def _look_ahead_by_kind(computations: Sequence[Action], computed: Sequence[int]) -> Iterator[Sequence[int]]:
    """The same where forwards and backwards alternate: so many computations of each kind early, and what a
    microbatch's backward needs right after its forward. Else a group waits to send a forward that the next
    one takes only once it has sent a backward that the first one does not take yet."""
    to_come = {kind: deque(p for p in computed if computations[p].kind is kind) for kind in (Kind.F, Kind.B)}
    num_left = {kind: len(positions) for kind, positions in to_come.items()}
    backwards = {(computations[p].ministage, computations[p].microbatch): p for p in to_come[Kind.B]}
    before: Action | None = None
    for position in computed:
        found: list[int] = []
        if before is not None and before.kind is Kind.F:
            own = backwards.get((before.ministage, before.microbatch))
            found += [] if own is None else [own]
        now = computations[position].kind
        for kind, positions in to_come.items():
            while positions and num_left[kind] - len(positions) < RECEIVES_AHEAD + (kind is now):
                found.append(positions.popleft())
        num_left[now] -= 1
        before = computations[position]
        yield found
