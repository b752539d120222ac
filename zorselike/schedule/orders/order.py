"""An order of computations: what one schedule has other than another. Lowering adds all else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    receives_by_kind: bool = False
    """Forwards and backwards alternate, so their receives are counted apart (`schedule/lowering/`)."""
    transfers: Mapping[int, Sequence[Around]] | None = None
    """Per rank, around each computation of its group; None: where `schedule/lowering/` places them."""

    @cached_property
    def turning(self) -> int | None:
        """The last ministage, if each microbatch goes forward and at once backward there, and all go forward
        first through the one before it, which is so sent gradients while it goes forward."""
        everything = [action for in_order in self.computations for action in in_order]
        last = max((action.ministage or 0 for action in everything), default=0)
        own, before = ([a for a in everything if a.ministage == i] for i in (last, last - 1))
        kinds = [action.kind for action in before]
        forward, backward = own[::2], own[1::2]
        turns = [replace(action, kind=Kind.B) for action in forward] == backward
        return last if turns and kinds == sorted(kinds, key=(Kind.F, Kind.B).index) else None


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
