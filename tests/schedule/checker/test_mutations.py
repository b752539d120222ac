"""A right schedule that is changed anywhere is refused."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import pytest
import volume
from schedules import Lists, random_spec

from zorselike.plan.plan import Plan
from zorselike.schedule import Action, Kind, ScheduleSpec, build
from zorselike.schedule.actions import RECEIVES, SENDS, TRANSFERS
from zorselike.schedule.checker.check import check
from zorselike.schedule.errors import ScheduleError

Mutation = Callable[[random.Random, Plan, Lists], str | None]
"""Changes the lists in one place and says how; None if there is no such place."""


def _places(lists: Lists, *kinds: Kind) -> list[tuple[int, int]]:
    return [(r, i) for r, own in lists.items() for i, action in enumerate(own) if action.kind in kinds]


def _drop(*kinds: Kind) -> Mutation:
    def mutate(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
        places = _places(lists, *kinds)
        if not places:
            return None
        rank, position = rng.choice(places)
        return f"dropped {lists[rank].pop(position)} of rank {rank}"

    return mutate


def _repeat(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    rank, position = rng.choice(_places(lists, *Kind))
    target = rng.randint(0, len(lists[rank]))
    lists[rank].insert(target, lists[rank][position])
    return f"repeated {lists[rank][target]} of rank {rank} at {target}"


def _swap_collectives(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    kinds = {Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.NORM, Kind.TIE_GRAD}
    shared = [rank for group in plan.groups if len(group.flat_ranks) > 1 for rank in group.flat_ranks]
    for rank in rng.sample(shared, len(shared)):
        positions = [i for i, action in enumerate(lists[rank]) if action.kind in kinds]
        pairs = [(i, j) for i, j in pairwise(positions) if lists[rank][i] != lists[rank][j]]
        if pairs:
            _swap(lists[rank], *rng.choice(pairs))
            return f"swapped two collectives of rank {rank}"
    return None


def _swap(own: list[Action], i: int, j: int) -> None:
    own[i], own[j] = own[j], own[i]


def _swap_on_a_channel(kinds: frozenset[Kind]) -> Mutation:
    def mutate(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
        channels: defaultdict[tuple[int, int | None, Kind], list[int]] = defaultdict(list)
        for rank, position in _places(lists, *kinds):
            action = lists[rank][position]
            channels[rank, action.peer, action.kind].append(position)
        long = [(key[0], positions) for key, positions in channels.items() if len(positions) > 1]
        if not long:
            return None
        rank, positions = rng.choice(long)
        _swap(lists[rank], *rng.sample(positions, 2))
        return f"swapped two transfers of rank {rank}"

    return mutate


def _shift_rows(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    places = _places(lists, *TRANSFERS)
    if not places:
        return None
    rank, position = rng.choice(places)
    action = lists[rank][position]
    assert action.start is not None and action.stop is not None
    start, stop = rng.choice(((-1, 0), (1, 0), (0, -1), (0, 1), (1, 1), (-1, -1)))
    lists[rank][position] = action._replace(start=action.start + start, stop=action.stop + stop)
    return f"made {action} of rank {rank} {lists[rank][position]}"


def _redirect(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    places = _places(lists, *TRANSFERS)
    if not places:
        return None
    rank, position = rng.choice(places)
    action = lists[rank][position]
    peers = sorted({*range(plan.num_ranks + 1)} - {action.peer})
    lists[rank][position] = action._replace(peer=rng.choice(peers))
    return f"made {action} of rank {rank} {lists[rank][position]}"


def _both_ends(rng: random.Random, lists: Lists) -> tuple[int, int, int, int] | None:
    """A send, by rank and position, and its receive."""
    places = _places(lists, *SENDS)
    if not places:
        return None
    rank, position = rng.choice(places)
    send = lists[rank][position]
    assert send.peer is not None and send.ministage is not None
    forward = send.kind is Kind.SEND_F
    kind = Kind.RECV_F if forward else Kind.RECV_B
    wanted = (kind, send.ministage + (1 if forward else -1), rank, send.start, send.stop, send.positions)
    for other, action in enumerate(lists[send.peer]):
        found = (action.kind, action.ministage, action.peer, action.start, action.stop, action.positions)
        if found == wanted:
            return rank, position, send.peer, other
    return None


def _drop_both_ends(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    ends = _both_ends(rng, lists)
    if ends is None:
        return None
    rank, position, peer, other = ends
    return f"dropped {lists[rank].pop(position)} of rank {rank} and {lists[peer].pop(other)} of rank {peer}"


def _shorten_both_ends(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    ends = _both_ends(rng, lists)
    if ends is None:
        return None
    for rank, position in (ends[:2], ends[2:]):
        action = lists[rank][position]
        assert action.stop is not None
        lists[rank][position] = action._replace(stop=action.stop - 1)
    return f"left out the last row of a transfer from rank {ends[0]} to rank {ends[2]}"


def _repeat_both_ends(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    ends = _both_ends(rng, lists)
    if ends is None:
        return None
    for rank, position in (ends[:2], ends[2:]):
        lists[rank].insert(position, lists[rank][position])
    return f"repeated a transfer from rank {ends[0]} to rank {ends[2]}"


def _shift_positions(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    """At one end or at both."""
    ends = _both_ends(rng, lists)
    if ends is None or lists[ends[0]][ends[1]].positions is None:
        return None
    shift = rng.choice(((-1, 0), (1, 0), (0, -1), (0, 1), (1, 1), (-1, -1)))
    for rank, position in (ends[:2], ends[2:])[: rng.randint(1, 2)]:
        action = lists[rank][position]
        assert action.positions is not None
        first, last = (p + by for p, by in zip(action.positions, shift, strict=True))
        lists[rank][position] = action._replace(positions=(first, last))
    return f"shifted the positions of a transfer from rank {ends[0]} to rank {ends[2]} by {shift}"


def _forget_positions(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    """As if two single ranks sent to each other, or these told positions."""
    ends = _both_ends(rng, lists)
    if ends is None:
        return None
    told = lists[ends[0]][ends[1]].positions
    for rank, position in (ends[:2], ends[2:]):
        positions = (0, plan.sequence_length or 8) if told is None else None
        lists[rank][position] = lists[rank][position]._replace(positions=positions)
    return f"made a transfer from rank {ends[0]} to rank {ends[2]} one of all positions"


def _swap_inside_a_replica(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    """Two computations of one rank that differ, one after the other."""
    kinds = {Kind.F, Kind.B}
    shared = [r for g in plan.groups for replica in g.replicas if replica.degree > 1 for r in replica.ranks]
    for rank in rng.sample(shared, len(shared)):
        computed = [i for i, action in enumerate(lists[rank]) if action.kind in kinds]
        pairs = [(i, j) for i, j in pairwise(computed) if j == i + 1]
        if pairs:
            _swap(lists[rank], *rng.choice(pairs))
            return f"swapped two computations of rank {rank}"
    return None


def _gather_earlier(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    """Past the release before it, which frees the room for it."""
    places = []
    for rank, position in _places(lists, Kind.UNSHARD):
        if plan.groups[plan.group_of_rank[rank]].zero == 2:
            kinds = [action.kind for action in lists[rank][:position]]
            if Kind.RESHARD in kinds and Kind.UNSHARD not in kinds[_last(kinds, Kind.RESHARD) :]:
                places.append((rank, position, _last(kinds, Kind.RESHARD)))
    if not places:
        return None
    rank, position, target = rng.choice(places)
    lists[rank].insert(target, lists[rank].pop(position))
    return f"moved {lists[rank][target]} of rank {rank} from {position} to {target}"


def _last(kinds: list[Kind], kind: Kind) -> int:
    return len(kinds) - 1 - kinds[::-1].index(kind)


def _compute_before_inputs(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    """A computation ahead of the first receive that brings it rows."""
    first: dict[tuple[int, Kind, int | None, int | None], int] = {}
    for rank, position in _places(lists, *RECEIVES):
        action = lists[rank][position]
        compute = Kind.F if action.kind is Kind.RECV_F else Kind.B
        first.setdefault((rank, compute, action.ministage, action.microbatch), position)
    if not first:
        return None
    rank, kind, ministage, microbatch = rng.choice(sorted(first))
    position = lists[rank].index(Action(kind, ministage, microbatch))
    lists[rank].insert(first[rank, kind, ministage, microbatch], lists[rank].pop(position))
    return f"moved {ministage}{kind}{microbatch} of rank {rank} before its input"


def _update_before_reduction(rng: random.Random, plan: Plan, lists: Lists) -> str | None:
    places = _places(lists, Kind.STEP)
    if not places:
        return None
    rank, position = rng.choice(places)
    step = lists[rank].pop(position)
    computed = [i for i, action in enumerate(lists[rank]) if action.kind in (Kind.B, Kind.REDUCE_GRAD)]
    own = [i for i in computed if lists[rank][i].ministage == step.ministage]
    if not own:
        return None
    lists[rank].insert(own[-1], step)
    return f"moved {step} of rank {rank} to {own[-1]}"


MUTATIONS: dict[str, Mutation] = {
    "drop anything": _drop(*Kind),
    "drop a computation": _drop(Kind.F, Kind.B),
    "drop a receive": _drop(*RECEIVES),
    "drop a send": _drop(*SENDS),
    "drop a gather": _drop(Kind.UNSHARD),
    "drop a release": _drop(Kind.RESHARD),
    "drop a reduction": _drop(Kind.REDUCE_GRAD),
    "drop an update": _drop(Kind.STEP, Kind.NORM, Kind.TIE_GRAD, Kind.TIE_VALUE, Kind.TIE_FETCH),
    "repeat anything": _repeat,
    "swap two collectives": _swap_collectives,
    "swap two sends on a channel": _swap_on_a_channel(SENDS),
    "swap two receives on a channel": _swap_on_a_channel(RECEIVES),
    "wrong rows": _shift_rows,
    "wrong peer": _redirect,
    "drop a transfer at both ends": _drop_both_ends,
    "shorten a transfer at both ends": _shorten_both_ends,
    "repeat a transfer at both ends": _repeat_both_ends,
    "shift positions": _shift_positions,
    "forget positions": _forget_positions,
    "swap two computations inside a replica": _swap_inside_a_replica,
    "gather earlier": _gather_earlier,
    "compute before inputs": _compute_before_inputs,
    "update before reduction": _update_before_reduction,
}

OF_REPLICAS = {"shift positions", "forget positions", "swap two computations inside a replica"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_schedule_is_refused(name: str) -> None:
    num_changed = 0
    seeds = volume.part(range(120), least=24)
    for seed in seeds:
        rng = random.Random(f"{name}/{seed}")
        spec = random_spec(rng, small=seed % 12 > 0, replicas=name in OF_REPLICAS or seed % 3 == 0)
        lists = build(spec)
        change = MUTATIONS[name](rng, spec.plan, lists)
        if change is not None:
            num_changed += 1
            _assert_refused(spec, lists, f"seed {name}/{seed}: {change}")
    assert num_changed >= len(seeds) / 6  # A part of the cases varies by the day.


@pytest.mark.nightly
def test_no_action_of_a_schedule_can_be_left_out() -> None:
    for seed in volume.part(range(25)):
        spec = random_spec(random.Random(seed), small=True, replicas=seed % 3 == 0)
        lists = build(spec)
        for rank, own in lists.items():
            for position in range(len(own)):
                changed = {**lists, rank: own[:position] + own[position + 1 :]}
                _assert_refused(spec, changed, f"seed {seed}: {own[position]} of rank {rank} left out")


def _assert_refused(spec: ScheduleSpec, lists: Lists, change: str) -> None:
    try:
        check(spec, lists)
    except ScheduleError:
        return
    pytest.fail(f"not refused: {change}")
