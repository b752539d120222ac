"""An order of computations: what one schedule has other than another. Lowering adds all else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from zorselike.schedule.actions import COMPUTE, SENDS, Action, Kind


class Around(NamedTuple):
    """Transfers of one rank right before and right after a computation."""

    before: list[Action]
    after: list[Action]


@dataclass(frozen=True)
class Order:
    """What every group computes, in order."""

    computations: tuple[tuple[Action, ...], ...]
    """Per group, `F` and `B` of its ministages, of as many microbatches as its ranks have at most. All its
    ranks follow them, each leaving out the microbatches that it does not have."""
    keeps_gathered: bool = False
    """ZeRO 2 keeps a ministage gathered from first to last use, as ZeRO 1 does: the order returns to it
    again and again. Otherwise ZeRO 2 gathers once for all of its forward, once for all of its backward."""
    alternating: frozenset[int] = frozenset()
    """Ministages whose forwards and backwards alternate, so that their receives are counted apart
    (`schedule/lowering/`)."""
    transfers: Mapping[int, Sequence[Around]] | None = None
    """Per rank, around each computation of its group; None: where `schedule/lowering/` places them."""


def find_first_in_turn(owners: Sequence[int]) -> int:
    """The first of the last ministages that are each of another group; `owners`: the group of each one."""
    first = len(owners) - 1
    while first and owners[first - 1] not in owners[first:]:
        first -= 1
    return first


def find_alternating(computations: Iterable[Sequence[Action]], owners: Sequence[int]) -> frozenset[int]:
    """The last ministages, each of another group, if the last of all goes forward again after it went
    backward: gradients come back while those before it go forward."""
    last = len(owners) - 1
    kinds = [action.kind for in_order in computations for action in in_order if action.ministage == last]
    alternates = (Kind.B, Kind.F) in pairwise(kinds)
    return frozenset(range(find_first_in_turn(owners), len(owners)) if alternates else ())


def find_around(actions: Iterable[Action]) -> list[Around]:
    """The transfers around each computation of a list of both. Those before a send follow a computation."""
    found: list[Around] = []
    pending: list[Action] = []
    for action in actions:
        if action.kind in COMPUTE:
            found.append(Around(pending, []))
            pending = []
        else:
            pending.append(action)
            if found and action.kind in SENDS:
                found[-1].after.extend(pending)
                pending = []
    if found:
        found[-1].after.extend(pending)
    return found
