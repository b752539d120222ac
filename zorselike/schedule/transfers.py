"""Which rows travel from whom to whom between two neighbouring ministages.

Many-to-many by interval intersection (Zorse 4.2): any group sizes, any microbatch sizes,
every transfer a contiguous slice of one microbatch at both ends. Between replicas of tensor-parallel degrees
a and b the same holds of positions: each rank sends its own to those that have them there, in a + b - 1
messages at most, and nothing twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zorselike.plan.pieces import positions_of
from zorselike.plan.plan import Group, Replica
from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.spec import ScheduleSpec


class RowRange(NamedTuple):
    """Rows `[start, stop)` of the global batch, from one replica's microbatch to another's; replicas are
    known by their first ranks."""

    source: int
    source_microbatch: int
    target: int
    target_microbatch: int
    start: int
    stop: int


def match_rows(source: Group, target: Group) -> list[RowRange]:
    """The rows that microbatches of two groups share, by row; ranks number their microbatches from 0."""
    sources, targets = _sort_by_row(source), _sort_by_row(target)
    found = []
    i = j = 0
    # Both cover the batch without gaps, so that walking them side by side meets every shared row.
    while i < len(sources) and j < len(targets):
        start, stop, source_rank, sent = sources[i]
        first, last, target_rank, received = targets[j]
        found.append(RowRange(source_rank, sent, target_rank, received, max(start, first), min(stop, last)))
        i += stop <= last
        j += last <= stop
    return found


def _sort_by_row(group: Group) -> list[tuple[int, int, int, int]]:
    """Start, stop, rank and number of each microbatch."""
    return sorted(
        (microbatch.start, microbatch.stop, replica.first, number)
        for replica in group.replicas
        for number, microbatch in enumerate(group.microbatches_by_rank[replica.first])
    )


def match_positions(
    source: Replica, target: Replica, num_positions: int
) -> dict[int, list[tuple[int, tuple[int, int] | None]]]:
    """The positions that ranks of two replicas share: for each of the source those of the target, with the
    positions, or None where both are single ranks, which share all."""
    if source.degree == target.degree == 1:
        return {source.first: [(target.first, None)]}
    cut = [
        [(rank, positions_of(replica, rank, num_positions)) for rank in replica.ranks]
        for replica in (source, target)
    ]
    return {
        rank: [
            (peer, (max(start, first), min(stop, last)))
            for peer, (first, last) in cut[1]
            if max(start, first) < min(stop, last)
        ]
        for rank, (start, stop) in cut[0]
    }


class Transfer(NamedTuple):
    """Both ends of a transfer, and the computation that it follows."""

    source: int
    target: int
    position: int
    """Of the computation, among those of the source's group."""
    send: Action
    receive: Action


def list_transfers(
    spec: ScheduleSpec, computations: Sequence[Sequence[Action]], ranks: Collection[int] | None = None
) -> Iterator[Transfer]:
    """All transfers of a step, or those from or to some ranks, by group, rank, computation (of each group, in
    order), row and position."""
    plan = spec.plan
    firsts = None if ranks is None else {plan.replica_of(rank).first for rank in ranks}
    for g, (group, in_order) in enumerate(zip(plan.groups, computations, strict=True)):
        targets = _find_targets(spec, g)
        sent = {
            target: _by_microbatch(
                rows
                for rows in match_rows(group, plan.groups[target])
                if firsts is None or rows.source in firsts or rows.target in firsts
            )
            for target in {target for _, target in targets.values()}
        }
        sources = {source for rows in sent.values() for source, _ in rows}
        shared = _SharedPositions(spec, ranks)
        for source in (source for source in group.flat_ranks if group.replica_of(source).first in sources):
            first = group.replica_of(source).first
            for position, computation in enumerate(in_order):
                kind, ministage, microbatch = computation.kind, computation.ministage, computation.microbatch
                if (kind, ministage) not in targets:
                    continue
                neighbour, target = targets[kind, ministage]
                send, receive = _TRANSFERS[kind]
                for _, _, its_first, number, start, stop in sent[target].get((first, microbatch), ()):
                    for peer, positions in shared.between(source, its_first):
                        yield Transfer(
                            source,
                            peer,
                            position,
                            Action(send, ministage, microbatch, peer, start, stop, positions),
                            Action(receive, neighbour, number, source, start, stop, positions),
                        )


class _SharedPositions:
    """Whom a rank sends its positions to among the ranks of another replica, each pair matched once."""

    def __init__(self, spec: ScheduleSpec, ranks: Collection[int] | None) -> None:
        self._spec = spec
        self._ranks = ranks
        self._found: dict[tuple[int, int], list[tuple[int, tuple[int, int] | None]]] = {}

    def between(self, source: int, target: int) -> Sequence[tuple[int, tuple[int, int] | None]]:
        """Ranks of the replica whose first is `target`, those left out that nobody asks for."""
        if (source, target) not in self._found:
            plan, ranks = self._spec.plan, self._ranks
            replicas = plan.replica_of(source), plan.replica_of(target)
            for rank, peers in match_positions(*replicas, self._spec.num_positions).items():
                wanted = peers
                if ranks is not None and rank not in ranks:
                    wanted = [(peer, positions) for peer, positions in peers if peer in ranks]
                self._found[rank, target] = wanted
        return self._found[source, target]


def _by_microbatch(ranges: Iterable[RowRange]) -> Mapping[tuple[int, int | None], Sequence[RowRange]]:
    """By rank and microbatch of the source."""
    found: defaultdict[tuple[int, int | None], list[RowRange]] = defaultdict(list)
    for rows in ranges:
        found[rows.source, rows.source_microbatch].append(rows)
    return found


_TRANSFERS = {Kind.F: (Kind.SEND_F, Kind.RECV_F), Kind.B: (Kind.SEND_B, Kind.RECV_B)}


def _find_targets(spec: ScheduleSpec, g: int) -> dict[tuple[Kind, int | None], tuple[int, int]]:
    """The ministage and the group that take the results of each of a group's ministages, if another group."""
    targets: dict[tuple[Kind, int | None], tuple[int, int]] = {}
    for ministage in spec.plan.ministages_of_group(g):
        for kind, step in ((Kind.F, 1), (Kind.B, -1)):
            group = spec.remote_neighbour(ministage, step)
            if group is not None and (kind is Kind.F or ministage > spec.lowest_backward):
                targets[kind, ministage] = (ministage + step, group)
    return targets
