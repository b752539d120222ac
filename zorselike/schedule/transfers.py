"""Which rows travel from whom to whom between two neighbouring ministages.

Many-to-many by interval intersection (Zorse 4.2): any group sizes, any microbatch sizes,
every transfer a contiguous slice of one microbatch at both ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zorselike.plan.plan import Group, Microbatch, Plan
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


@dataclass(frozen=True)
class NumberedMicrobatch:
    """A microbatch with the number that its rank knows it by."""

    number: int
    microbatch: Microbatch


def number_microbatches(group: Group) -> list[NumberedMicrobatch]:
    """A group's microbatches by first row, each with its rank's number for it."""
    numbered = [
        NumberedMicrobatch(number, microbatch)
        for of_rank in group.microbatches_by_rank.values()
        for number, microbatch in enumerate(of_rank)
    ]
    return sorted(numbered, key=lambda item: item.microbatch.start)


def match_rows(
    source: NumberedMicrobatch, targets: Sequence[NumberedMicrobatch], starts: Sequence[int]
) -> list[RowRange]:
    """Where one microbatch's rows go in a group, by row; `targets` and their `starts` are sorted."""
    rows = source.microbatch
    found = []
    position = bisect_right(starts, rows.start) - 1
    while position < len(targets) and targets[position].microbatch.start < rows.stop:
        target = targets[position]
        found.append(
            RowRange(
                source=rows.rank,
                source_microbatch=source.number,
                target=target.microbatch.rank,
                target_microbatch=target.number,
                start=max(rows.start, target.microbatch.start),
                stop=min(rows.stop, target.microbatch.stop),
            )
        )
        position += 1
    return found


class RowMatches:
    """Where the rows of each microbatch go, from each group to each that takes its results."""

    def __init__(self, plan: Plan) -> None:
        self._by_row = [number_microbatches(group) for group in plan.groups]
        self._starts = [[item.microbatch.start for item in items] for items in self._by_row]
        self._found: dict[tuple[int, int], dict[tuple[int, int | None], list[RowRange]]] = {}

    def find(self, source: int, target: int) -> Mapping[tuple[int, int | None], Sequence[RowRange]]:
        """Rows that go from group to group, by rank and microbatch of the source."""
        if (source, target) not in self._found:
            targets, starts = self._by_row[target], self._starts[target]
            self._found[source, target] = {
                (item.microbatch.rank, item.number): match_rows(item, targets, starts)
                for item in self._by_row[source]
            }
        return self._found[source, target]


class Transfer(NamedTuple):
    """Both ends of a transfer, and the computation that it follows."""

    source: int
    target: int
    position: int
    """Of the computation, among those of the source's group."""
    send: Action
    receive: Action


def list_transfers(spec: ScheduleSpec, computations: Sequence[Sequence[Action]]) -> Iterator[Transfer]:
    """All transfers of a step, by group, rank, computation (of each group, in order) and row."""
    plan, matches = spec.plan, RowMatches(spec.plan)
    for g, (group, in_order) in enumerate(zip(plan.groups, computations, strict=True)):
        targets = _find_targets(spec, g)
        for source in group.flat_ranks if targets else ():
            for position, computation in enumerate(in_order):
                kind, ministage, microbatch = computation.kind, computation.ministage, computation.microbatch
                if (kind, ministage) not in targets:
                    continue
                neighbour, target = targets[kind, ministage]
                send, receive = _TRANSFERS[kind]
                for _, _, peer, number, start, stop in matches.find(g, target).get((source, microbatch), ()):
                    yield Transfer(
                        source,
                        peer,
                        position,
                        Action(send, ministage, microbatch, peer, start, stop),
                        Action(receive, neighbour, number, source, start, stop),
                    )


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
