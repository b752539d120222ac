"""Who is counted: the members of a generation, the tree that joins them, and the rule of who may go on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from zorselike.elastic.contract import Member

UNKNOWN = -1
"""In place of the number of a generation that nobody can tell."""


@dataclass(frozen=True)
class Roster:
    """Members in the order of a tree: the first is its root, and each has `fan_out` children after it."""

    number: int
    """Of the meeting or generation that they belong to."""
    members: tuple[Member, ...]

    @cached_property
    def places(self) -> Mapping[str, int]:
        """By id, the place in the tree."""
        return {member.id: place for place, member in enumerate(self.members)}

    def __contains__(self, id: object) -> bool:
        return id in self.places

    @property
    def root(self) -> Member:
        return self.members[0]

    def parent(self, id: str, fan_out: int) -> Member | None:
        """Whose child a member is; None for the root."""
        place = self.places[id]
        return self.members[(place - 1) // fan_out] if place else None

    def children(self, id: str, fan_out: int) -> tuple[Member, ...]:
        first = self.places[id] * fan_out + 1
        return self.members[first : first + fan_out]

    def depth(self, id: str, fan_out: int) -> int:
        """How many links lie between a member and the root."""
        place, depth = self.places[id], 0
        while place:
            place, depth = (place - 1) // fan_out, depth + 1
        return depth


def may_go_on(base: Roster, present: Collection[str], dead: Mapping[str, int], *, in_doubt: bool) -> bool:
    """Whether those present may go on from a generation, so that never two sides do.

    They may if all others have certainly ended, or if they are the majority, or half with the first member.

    Args: see `have_all_ended`.
    """
    num_present = sum(member.id in present for member in base.members)
    first = min(base.members, key=lambda member: member.number)
    return (
        have_all_ended(base, present, dead, in_doubt=in_doubt)
        or 2 * num_present > len(base.members)
        or (2 * num_present == len(base.members) and first.id in present)
    )


def have_all_ended(
    base: Roster, present: Collection[str], dead: Mapping[str, int], *, in_doubt: bool
) -> bool:
    """Whether certainly nobody else can go on from a generation.

    Counting out the dead supposes that none of them went on into a later generation that those present do
    not know of. Whoever was out of touch for a while is in doubt of that: then only those of the dead are
    counted out whose last generation is known to be this one.

    Args:
        present: ids of who takes part.
        dead: ids of those whose processes have certainly ended, with the number of the last generation that
            each belonged to (`UNKNOWN`: nobody can tell).
        in_doubt: whether somebody present was out of touch with the others since that generation began.
    """
    missing = [member.id for member in base.members if member.id not in present]
    return all(id in dead and (not in_doubt or UNKNOWN < dead[id] <= base.number) for id in missing)
