"""What the leader decides from what all members have said: who runs, by which plan, from which state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zorselike.elastic.contract import Json, Member
from zorselike.elastic.deciding.same_groups import with_smaller_microbatches, without_ranks
from zorselike.elastic.held import Origin
from zorselike.errors import ClusterError
from zorselike.plan.parts import Group, Replica
from zorselike.plan.plan import Plan
from zorselike.text.wording import count


class Source(NamedTuple):
    """A step from which all can go on."""

    generation: int
    step: int


@dataclass(frozen=True)
class Situation:
    """Who is there for the next generation."""

    plan: Plan
    """Of the generation before; of a job that starts, the first."""
    players: tuple[Member | None, ...]
    """Who plays each of its ranks; None: gone, or leaving."""
    spares: tuple[Member, ...]
    """Who else is there, in the order of joining."""
    refused: tuple[str, ...] = ()
    """Why plans that were tried now cannot be."""
    slower: Mapping[str, float] = field(default_factory=dict)
    """By id: how many times longer members compute than they did at first."""
    exhausted: Mapping[str, int] = field(default_factory=dict)
    """By id: how often a member's memory did not suffice."""

    @property
    def members(self) -> tuple[Member, ...]:
        """All who are there."""
        return tuple(member for member in (*self.players, *self.spares) if member is not None)


class Placement(NamedTuple):
    """A plan, and who plays its ranks."""

    plan: Plan
    ids: tuple[str, ...]


Planner = Callable[[Situation], Placement]
"""Raises `PlanError` where nothing fits."""


def keep_groups(situation: Situation) -> Placement:
    """The default rule: a spare takes the place of who is gone, if its memory is no smaller than that of the
    others in that group; else the others of the group take over the share. A tensor-parallel replica takes in
    who is like its other ranks and in their node; anybody else in its place computes rows alone.

    Raises:
        PlanError: Nobody is left.
    """
    plan = situation.plan
    players = list(situation.players)
    spares = list(situation.spares)
    for replica in (replica for group in plan.groups for replica in group.replicas if replica.degree > 1):
        home = _home_of(replica, players)
        for rank in replica.ranks:
            player = players[rank]
            like = [spare for spare in spares if _place_of(spare) == home]
            if like and (player is None or _place_of(player) != home):
                players[rank] = like[0]
                spares.remove(like[0])
                spares += [player] if player else []
    for rank, player in enumerate(players):
        if player is None and spares:
            group = plan.groups[plan.group_of_rank[rank]]
            mates = [mate for other in group.flat_ranks if (mate := players[other]) is not None]
            needed = min((mate.memory_bytes for mate in mates), default=0)
            fitting = [spare for spare in spares if spare.memory_bytes >= needed]
            if fitting:
                players[rank] = fitting[0]
                spares.remove(fitting[0])
    gone = {rank for rank, player in enumerate(players) if player is None}
    apart = {
        rank
        for group in plan.groups
        for replica in group.replicas
        for rank in replica.ranks
        if (player := players[rank]) is not None and _place_of(player) != _home_of(replica, players)
    }
    if not gone and not apart:
        return Placement(plan, tuple(player.id for player in players if player is not None))
    kept = without_ranks(plan, gone, apart)
    there = [players[rank] for rank in kept.old_ranks]
    return Placement(kept.plan, tuple(player.id for player in there if player is not None))


def _place_of(member: Member) -> tuple[str, str]:
    """What the ranks of a tensor-parallel replica have in common."""
    return member.node, member.device_type


def _home_of(replica: Replica, players: Sequence[Member | None]) -> tuple[str, str] | None:
    """Where most who play its ranks are; None if there are none."""
    places = [_place_of(player) for rank in replica.ranks if (player := players[rank]) is not None]
    return max(places, key=places.count, default=None)


def relieve(situation: Situation, exhausted: Sequence[str]) -> Situation:
    """The situation with less held at once in the groups of members that were out of memory.

    Raises:
        PlanError: Less is not possible.
    """
    ids = [None if player is None else player.id for player in situation.players]
    relieved = relieve_running(situation.plan, [id or "" for id in ids], exhausted)
    return replace(situation, plan=relieved.plan)


def relieve_running(plan: Plan, ranks: Sequence[str], exhausted: Sequence[str]) -> Placement:
    """A plan that runs, with less held at once in the groups of members that were out of memory.

    Args:
        ranks: ids by rank of it.

    Raises:
        PlanError: Less is not possible.
    """
    for group in sorted({plan.group_of_rank[ranks.index(own)] for own in exhausted if own in ranks}):
        plan = with_smaller_microbatches(plan, group)
    return Placement(plan, tuple(ranks))


def seat(plan: Plan, members: Sequence[Member]) -> tuple[Member | None, ...]:
    """Who plays each rank of a job's first plan: whom its devices name, or else in the order of joining, but
    for the ranks of a tensor-parallel replica, who are in one node."""
    left = list(members)
    seats: list[Member | None] = [None] * plan.num_ranks
    for device in plan.devices:
        for member in left:
            if (member.node, member.local_rank) == (device.node, device.local_rank):
                seats[device.rank] = member
                left.remove(member)
                break
    replicas = [replica for group in plan.groups for replica in group.replicas if replica.degree > 1]
    for replica in sorted(replicas, key=lambda replica: -replica.degree):
        free = [rank for rank in replica.ranks if seats[rank] is None]
        num_free = Counter(map(_place_of, left))
        home = _home_of(replica, seats)
        homes = [home] if home else sorted(num_free, key=lambda place: num_free[place])
        for place in [place for place in homes if num_free[place] >= len(free)][:1]:
            for rank in free:
                member = next(member for member in left if _place_of(member) == place)
                seats[rank] = member
                left.remove(member)
    for rank in range(plan.num_ranks):
        if seats[rank] is None and left:
            seats[rank] = left.pop(0)
    return tuple(seats)


def without_zero_3(plan: Plan) -> Plan:
    """The plan with ZeRO 2 in place of 3, which some models refuse where shares differ."""
    groups = tuple(replace(group, zero=2) if group.zero == 3 else group for group in plan.groups)
    return replace(plan, groups=groups)


def is_out_of_memory(error: str) -> bool:
    """Whether a member's error, as it is told, says that its memory did not suffice."""
    text = error.lower()
    return any(words in text for words in ("out of memory", "outofmemory", "memoryerror", "can't allocate"))


def find_source(offers: Mapping[str, Json]) -> Source | None:
    """The newest step that living members hold whole between them; None if there is no such step."""
    ranks: dict[Source, set[int]] = {}
    sizes: dict[Source, int] = {}
    for offer in offers.values():
        for origin in (Origin(*entry) for entry in offer.get("holds", ())):
            source = Source(origin.generation, origin.step)
            ranks.setdefault(source, set()).add(origin.rank)
            sizes[source] = origin.num_ranks
    whole = [source for source, held in ranks.items() if len(held) == sizes[source]]
    return max(whole, key=lambda source: (source.step, source.generation), default=None)


def find_givers(offers: Mapping[str, Json], source: Source | None) -> list[str]:
    """Who holds something of it."""
    return [
        own
        for own, offer in offers.items()
        if any(Source(*entry[:2]) == source for entry in offer.get("holds", ()))
    ]


def refuse_lost_state(offers: Mapping[str, Json], checkpoint: str | None) -> None:
    """Raises `ClusterError` where a state that was there cannot be had again."""
    furthest = max((offer.get("step", 0) for offer in offers.values()), default=0)
    if checkpoint is None and any(offer.get("has_state") for offer in offers.values()):
        raise ClusterError(
            f"no step up to {furthest} is whole in the memory of those who are left: too many were lost at "
            "once, and no checkpoint was saved; save one every now and then, and start the job again"
        )


def describe_change(
    before: Plan | None, placement: Placement, source: Source | None, *, num_spares: int = 0
) -> str:
    """One line."""
    ranks = placement.plan.num_ranks
    groups = " + ".join(map(_describe_group, placement.plan.groups))
    where = f", {count(num_spares, 'spare')}" if num_spares else ""
    where += "" if source is None else f", from step {source.step}"
    kept = "the same plan" if before is not None and before == placement.plan else "a plan"
    return f"{kept} for {count(ranks, 'rank')} in groups of {groups}{where}"


def _describe_group(group: Group) -> str:
    """How many ranks it has, and how many each of its replicas, where these have several."""
    degrees = ", ".join(str(replica.degree) for replica in group.replicas)
    return str(len(group.flat_ranks)) + (f" (replicas of {degrees})" if group.degree > 1 else "")
