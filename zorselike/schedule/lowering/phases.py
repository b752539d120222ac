"""Phases of a list: for how long it stays with one ministage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

from zorselike.schedule.actions import Action, Kind


def split_phases(computations: Iterable[Action]) -> Iterator[list[Action]]:
    """Consecutive computations of one ministage in one direction, or in both where its microbatches go
    forward and at once backward, by turns."""
    for _, found in groupby(computations, key=lambda action: action.ministage):
        own = list(found)
        turns = any((a.kind, b.kind) == (Kind.B, Kind.F) for a, b in pairwise(own))
        if turns or [action.kind for action in own] == [Kind.F, Kind.B]:  # Of one microbatch.
            yield own
        else:
            yield from (list(part) for _, part in groupby(own, key=lambda action: action.kind))
