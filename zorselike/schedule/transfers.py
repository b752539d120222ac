"""Which rows travel from whom to whom between two neighbouring ministages.

Many-to-many by interval intersection (Zorse 4.2): any group sizes, any microbatch sizes,
every transfer a contiguous slice of one microbatch at both ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zorselike.plan.plan import Group
from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.spec import ScheduleSpec


class RowRange(NamedTuple):
    """Rows `[start, stop)` of the global batch, from one rank's microbatch to another's."""

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
        (microbatch.start, microbatch.stop, rank, number)
        for rank, of_rank in group.microbatches_by_rank.items()
        for number, microbatch in enumerate(of_rank)
    )


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
    order) and row."""
    plan = spec.plan
    for g, (group, in_order) in enumerate(zip(plan.groups, computations, strict=True)):
        targets = _find_targets(spec, g)
        sent = {
            target: _by_microbatch(
                rows
                for rows in match_rows(group, plan.groups[target])
                if ranks is None or rows.source in ranks or rows.target in ranks
            )
            for target in {target for _, target in targets.values()}
        }
        sources = {source for rows in sent.values() for source, _ in rows}
        for source in (source for source in group.flat_ranks if source in sources):
            for position, computation in enumerate(in_order):
                kind, ministage, microbatch = computation.kind, computation.ministage, computation.microbatch
                if (kind, ministage) not in targets:
                    continue
                neighbour, target = targets[kind, ministage]
                send, receive = _TRANSFERS[kind]
                for _, _, peer, number, start, stop in sent[target].get((source, microbatch), ()):
                    yield Transfer(
                        source,
                        peer,
                        position,
                        Action(send, ministage, microbatch, peer, start, stop),
                        Action(receive, neighbour, number, source, start, stop),
                    )


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
