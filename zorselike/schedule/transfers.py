"""Which rows travel from whom to whom between two neighbouring ministages.

Many-to-many by interval intersection (Zorse 4.2): any group sizes, any microbatch sizes,
every transfer a contiguous slice of one microbatch at both ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from zorselike.plan.plan import Group, Microbatch


@dataclass(frozen=True)
class Transfer:
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
    """A group's microbatches by first row, each with its rank's own number for it."""
    numbered = [
        NumberedMicrobatch(number, microbatch)
        for own in group.microbatches_by_rank.values()
        for number, microbatch in enumerate(own)
    ]
    return sorted(numbered, key=lambda item: item.microbatch.start)


def match_rows(
    source: NumberedMicrobatch, targets: Sequence[NumberedMicrobatch], starts: Sequence[int]
) -> list[Transfer]:
    """Transfers of one microbatch's rows to a group, by row; `targets` and their `starts` are sorted."""
    rows = source.microbatch
    transfers = []
    position = bisect_right(starts, rows.start) - 1
    while position < len(targets) and targets[position].microbatch.start < rows.stop:
        target = targets[position]
        transfers.append(
            Transfer(
                source=rows.rank,
                source_microbatch=source.number,
                target=target.microbatch.rank,
                target_microbatch=target.number,
                start=max(rows.start, target.microbatch.start),
                stop=min(rows.stop, target.microbatch.stop),
            )
        )
        position += 1
    return transfers
