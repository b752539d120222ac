"""Schedules of tensor-parallel replicas: who sends which positions to whom, and what the checker proves."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import volume
from plans import with_bounds
from schedules import Lists, NaiveRun, random_spec, spec_of

from zorselike.plan.pieces import positions_of
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan, Replica
from zorselike.schedule import Action, Kind, ScheduleSpec, build, format_actions, parse_actions
from zorselike.schedule.actions import SENDS, TRANSFERS
from zorselike.schedule.checker.check import check
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.transfers import match_positions


def _random_spec(seed: int) -> ScheduleSpec:
    rng = random.Random(seed)
    spec = random_spec(rng, small=seed % 10 > 0, replicas=True)
    return spec_of(rng, with_bounds(spec.plan, rng)) if seed % 4 == 0 else spec


@volume.parametrize("seed", range(200))
def test_a_naive_run_agrees_on_where_sends_must_buffer(seed: int) -> None:
    rng, spec = random.Random(seed), _random_spec(seed)
    spec.plan.validate()
    lists = build(spec)
    buffered = check(spec, lists).buffered_edges
    assert NaiveRun(spec.plan, lists, spec.ties, None).ends(rng)
    assert NaiveRun(spec.plan, lists, spec.ties, buffered).ends(rng)
    assert NaiveRun(spec.plan, lists, spec.ties, frozenset()).ends(rng) == (not buffered)
    some = rng.sample(sorted(lists), rng.randint(1, len(lists)))
    assert build(spec, ranks=some) == {rank: own for rank, own in lists.items() if rank in some}


@volume.parametrize("seed", range(100))
def test_all_ranks_of_a_replica_do_the_same_but_for_transfers(seed: int) -> None:
    spec = _random_spec(seed)
    lists = {rank: [a for a in own if a.kind not in TRANSFERS] for rank, own in build(spec).items()}
    for group in spec.plan.groups:
        for replica in group.replicas:
            assert all(lists[rank] == lists[replica.first] for rank in replica.ranks)


def test_what_all_do_is_what_a_plan_of_first_ranks_does() -> None:
    """A replica is scheduled as one rank with its microbatches would be."""
    for seed in volume.part(range(60)):
        spec = random_spec(random.Random(seed), small=True, replicas=True)
        plan, ranks = spec.plan, sorted(r.first for group in spec.plan.groups for r in group.replicas)
        number = {rank: i for i, rank in enumerate(ranks)}
        groups = [
            replace(
                group,
                ranks=tuple(number[replica.first] for replica in group.replicas),
                microbatches=tuple(replace(m, rank=number[m.rank]) for m in group.microbatches),
            )
            for group in plan.groups
        ]
        alone = build(replace(spec, plan=replace(plan, groups=tuple(groups))))
        lists = build(spec)
        for rank in ranks:
            mine, single = (
                [a for a in own if a.kind not in TRANSFERS] for own in (lists[rank], alone[number[rank]])
            )
            assert mine == single


@volume.parametrize("seed", range(100))
def test_every_position_of_every_row_travels_once(seed: int) -> None:
    """Row by row and position by position, out of the plan alone."""
    spec = _random_spec(seed)
    plan, lists = spec.plan, build(spec)
    assert all(parse_actions(format_actions(own)) == own for own in lists.values())
    owner = [_owners(plan, g) for g in range(len(plan.groups))]
    found: Counter[tuple[Kind, int | None, int, int, int, int]] = Counter()
    num_sent: Counter[tuple[Kind, int | None, int, int, int | None]] = Counter()
    for rank, own in lists.items():
        for action in own:
            if action.kind not in TRANSFERS:
                continue
            assert action.peer is not None and action.start is not None and action.stop is not None
            if action.kind in SENDS:
                firsts = plan.replica_of(rank).first, plan.replica_of(action.peer).first
                num_sent[action.kind, action.ministage, *firsts, action.start] += 1
            for row in range(action.start, action.stop):
                for position in range(*(action.positions or (0, spec.num_positions))):
                    found[action.kind, action.ministage, row, position, rank, action.peer] += 1
    expected: Counter[tuple[Kind, int | None, int, int, int, int]] = Counter()
    for lower, (stage, after) in enumerate(pairwise(plan.ministages)):
        if stage.group == after.group:
            continue
        for at, rank in owner[stage.group].items():
            peer = owner[after.group][at]
            expected[Kind.SEND_F, lower, *at, rank, peer] += 1
            expected[Kind.RECV_F, lower + 1, *at, peer, rank] += 1
            if lower >= spec.lowest_backward:
                expected[Kind.SEND_B, lower + 1, *at, peer, rank] += 1
                expected[Kind.RECV_B, lower, *at, rank, peer] += 1
    assert found == expected
    for (_, _, source, target, _), messages in num_sent.items():
        assert messages <= plan.replica_of(source).degree + plan.replica_of(target).degree - 1


def _owners(plan: Plan, g: int) -> dict[tuple[int, int], int]:
    """The rank of a group that has each position of each row between layers."""
    length = plan.sequence_length or 1
    return {
        (row, position): rank
        for replica in plan.groups[g].replicas
        for microbatch in plan.microbatches_of_rank(replica.first)
        for rank in replica.ranks
        for row in range(microbatch.start, microbatch.stop)
        for position in range(*positions_of(replica, rank, length))
    }


@pytest.mark.parametrize("degrees", [(1, 1), (1, 4), (2, 2), (2, 3), (4, 2), (8, 3)])
def test_no_more_messages_than_both_degrees_but_one(degrees: tuple[int, int]) -> None:
    a, b = degrees
    source, target = Replica(tuple(range(a))), Replica(tuple(range(a, a + b)))
    for length in range(max(degrees), 40):
        pairs = match_positions(source, target, length)
        messages = [(rank, peer, positions) for rank, own in pairs.items() for peer, positions in own]
        assert len(messages) <= a + b - 1
        if degrees != (1, 1):
            carried = sorted(p for _, _, positions in messages for p in range(*(positions or ())))
            assert carried == list(range(length))


# -- a plan by hand ------------------------------------------------------------------------------

PLAN = Plan(
    global_batch=2,
    groups=(
        Group(((0, 1), 2), (Microbatch(0, 0, 1), Microbatch(2, 1, 2)), zero=0),
        Group(((3, 4, 5),), (Microbatch(3, 0, 2),), zero=0),
    ),
    ministages=(Ministage(0, ("layers.0",)), Ministage(1, ("layers.1",))),
    sequence_length=12,
)
BY_HAND = {
    0: "0F0 0SEND_F0@3[0:1,0:4] 0SEND_F0@4[0:1,4:6] 0RECV_B0@3[0:1,0:4] 0RECV_B0@4[0:1,4:6] 0B0",
    1: "0F0 0SEND_F0@4[0:1,6:8] 0SEND_F0@5[0:1,8:12] 0RECV_B0@4[0:1,6:8] 0RECV_B0@5[0:1,8:12] 0B0",
    2: "0F0 0SEND_F0@3[1:2,0:4] 0SEND_F0@4[1:2,4:8] 0SEND_F0@5[1:2,8:12] "
    "0RECV_B0@3[1:2,0:4] 0RECV_B0@4[1:2,4:8] 0RECV_B0@5[1:2,8:12] 0B0",
    3: "1RECV_F0@0[0:1,0:4] 1RECV_F0@2[1:2,0:4] 1F0 1B0 1SEND_B0@0[0:1,0:4] 1SEND_B0@2[1:2,0:4]",
    4: "1RECV_F0@0[0:1,4:6] 1RECV_F0@1[0:1,6:8] 1RECV_F0@2[1:2,4:8] 1F0 1B0 "
    "1SEND_B0@0[0:1,4:6] 1SEND_B0@1[0:1,6:8] 1SEND_B0@2[1:2,4:8]",
    5: "1RECV_F0@1[0:1,8:12] 1RECV_F0@2[1:2,8:12] 1F0 1B0 1SEND_B0@1[0:1,8:12] 1SEND_B0@2[1:2,8:12]",
}


def _by_hand(**changed: str) -> Lists:
    texts = BY_HAND | {int(rank.removeprefix("r")): text for rank, text in changed.items()}
    return {
        rank: parse_actions(f"{text} {ministage}REDUCE_GRAD {ministage}STEP")
        for rank, text in texts.items()
        for ministage in [PLAN.ministages_of_rank(rank)[0]]
    }


def test_degrees_two_and_one_to_three() -> None:
    spec = ScheduleSpec(PLAN.validate())
    check(spec, _by_hand())
    lists = {rank: [a for a in own if a.kind in SENDS] for rank, own in build(spec).items()}
    assert lists == {rank: [a for a in own if a.kind in SENDS] for rank, own in _by_hand().items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "r4": BY_HAND[4].replace("1RECV_F0@1[0:1,6:8] ", "", 1),
                "r1": BY_HAND[1].replace("0SEND_F0@4[0:1,6:8] ", ""),
            },
            r"rank 4, action 2, 1F0: it needs rows \[0:2\) at positions \[4:8\), and no RECV_F ahead of it "
            r"brings those from 0, position 6, on exactly once",
        ),
        (
            {
                "r4": BY_HAND[4].replace("@1[0:1,6:8]", "@1[0:1,5:8]"),
                "r1": BY_HAND[1].replace("@4[0:1,6:8]", "@4[0:1,5:8]"),
            },
            r"rank 1, action 1, .*: this rank has positions \[6:12\)",
        ),
        (
            {"r5": BY_HAND[5].replace("@2[1:2,8:12]", "@2[1:2]")},
            r"rank 5 or rank 2 has a part of the positions",
        ),
        ({"r5": BY_HAND[5].replace("1F0", "1F0 1OFFLOAD0")}, "offload"),
    ],
)
def test_faults_are_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(ScheduleSpec(PLAN), _by_hand(**changes))


def test_computations_of_a_replica_wait_for_each_other() -> None:
    """Ranks of a group may do them in any order (with ZeRO 0 to 2), those of a replica may not."""
    group = Group(((0, 1),), (Microbatch(0, 0, 1), Microbatch(0, 1, 2)), zero=0)
    plan = Plan(2, (group,), (Ministage(0, ("layers",)),), sequence_length=2)
    texts = "0F0 0B0 0F1 0B1 0REDUCE_GRAD 0STEP", "0F1 0B1 0F0 0B0 0REDUCE_GRAD 0STEP"
    spec = ScheduleSpec(plan.validate())
    with pytest.raises(
        ScheduleError, match=r"replica \[0, 1\], collective 0: rank 1 issues 0F1 where rank 0 .* 0F0"
    ):
        check(spec, {rank: parse_actions(text) for rank, text in enumerate(texts)})
    check(spec, {rank: parse_actions(texts[1]) for rank in range(2)})


def test_a_cycle_through_a_replica_is_found() -> None:
    """Rank 1 waits for gradients of what rank 2 gets only after rank 0, its mate, goes on."""
    group = Group(((0, 1),), (Microbatch(0, 0, 1),), zero=0)
    last = Group((2,), (Microbatch(2, 0, 1),), zero=0)
    plan = Plan(1, (group, last), (Ministage(0, ("a",)), Ministage(1, ("b",))), sequence_length=2).validate()
    texts = {
        0: "0F0 0SEND_F0@2[0:1,0:1] 0RECV_B0@2[0:1,0:1] 0B0 0REDUCE_GRAD 0STEP",
        1: "0F0 0RECV_B0@2[0:1,1:2] 0B0 0SEND_F0@2[0:1,1:2] 0REDUCE_GRAD 0STEP",
        2: "1RECV_F0@0[0:1,0:1] 1RECV_F0@1[0:1,1:2] 1F0 1B0 1SEND_B0@0[0:1,0:1] 1SEND_B0@1[0:1,1:2] "
        "1REDUCE_GRAD 1STEP",
    }
    with pytest.raises(ScheduleError, match="wait for each other forever"):
        check(ScheduleSpec(plan), {rank: parse_actions(text) for rank, text in texts.items()})


def test_an_evaluation_may_have_rows_of_another_length() -> None:
    spec = ScheduleSpec(PLAN, forward_only=True, sequence_length=3)
    lists = build(spec)
    check(spec, lists)
    assert Action(Kind.SEND_F, 0, 0, 3, 0, 1, (0, 1)) in lists[0]
    with pytest.raises(ScheduleError, match=r"^rows of 2 tokens .* too short for a replica of 3 ranks"):
        ScheduleSpec(PLAN, sequence_length=2)
    with pytest.raises(ScheduleError, match=r"^rows of 0 tokens \(sequence_length\)"):
        ScheduleSpec(replace(PLAN, sequence_length=None))
