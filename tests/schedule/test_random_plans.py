"""Over two thousand random plans: what `build` makes passes the checker, and is what it should be."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
import volume
from plans import random_plan
from schedules import Lists, NaiveRun, random_spec

from zorselike.plan.plan import Plan
from zorselike.schedule import Action, Kind, ScheduleSpec, build, format_actions, parse_actions
from zorselike.schedule.actions import TRANSFERS
from zorselike.schedule.checker.check import check

SMALL_PER_BLOCK = 180
LARGE_PER_BLOCK = 30


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(10))
def test_what_build_makes_is_right(block: int) -> None:
    for seed in volume.part(range(SMALL_PER_BLOCK + LARGE_PER_BLOCK)):
        rng = random.Random(f"{block}/{seed}")
        spec = random_spec(rng, small=seed < SMALL_PER_BLOCK)
        try:
            spec.plan.validate()
            lists = build(spec)
            report = check(spec, lists)
            assert report.num_actions == sum(map(len, lists.values()))
            assert len(report.cycles) <= len(report.buffered_edges)
            assert not report.early
            _assert_each_row_once(spec, lists)
            for own in lists.values():
                assert parse_actions(format_actions(own)) == own
        except Exception as error:
            error.add_note(f"seed {block}/{seed}")
            raise


def _assert_each_row_once(spec: ScheduleSpec, lists: Lists) -> None:
    """Counts rows by hand, without the checker."""
    plan = spec.plan
    computed: Counter[tuple[Kind, int | None, int]] = Counter()
    for rank, own in lists.items():
        rows = plan.microbatches_of_rank(rank)
        for action in own:
            if action.kind in (Kind.F, Kind.B):
                assert action.microbatch is not None
                for microbatch in rows[action.microbatch : action.microbatch + 1]:
                    for row in range(microbatch.start, microbatch.stop):
                        computed[action.kind, action.ministage, row] += 1
    trains = spec.trainable or (True,) * plan.num_ministages
    first = next((i for i, trained in enumerate(trains) if trained), plan.num_ministages)
    first = plan.num_ministages if spec.forward_only else first
    phases = [(Kind.F, i) for i in range(plan.num_ministages)]
    phases += [(Kind.B, i) for i in range(first, plan.num_ministages)]
    assert computed == {(kind, i, row): 1 for kind, i in phases for row in range(plan.global_batch)}


@volume.parametrize("seed", range(150))
def test_a_naive_run_agrees_on_where_sends_must_buffer(seed: int) -> None:
    rng = random.Random(seed)
    spec = random_spec(rng, small=seed % 10 > 0)
    plan = spec.plan
    lists = build(spec)
    buffered = check(spec, lists).buffered_edges
    assert NaiveRun(plan, lists, spec.ties, None).ends(rng)
    assert NaiveRun(plan, lists, spec.ties, buffered).ends(rng)
    assert NaiveRun(plan, lists, spec.ties, frozenset()).ends(rng) == (not buffered)


@volume.parametrize("seed", range(100))
def test_transfers_are_the_intersections_of_row_ranges(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, max_ministages_per_group=3, round_robin=rng.random() < 0.5)
    lists = build(ScheduleSpec(plan))
    found = Counter(
        (rank, action) for rank, own in lists.items() for action in own if action.kind in TRANSFERS
    )
    expected: Counter[tuple[int, Action]] = Counter()
    for lower, (stage, following) in enumerate(pairwise(plan.ministages)):
        if stage.group != following.group:
            expected.update(_intersect(plan, lower, Kind.SEND_F, lower + 1, Kind.RECV_F))
            expected.update(_intersect(plan, lower + 1, Kind.SEND_B, lower, Kind.RECV_B))
    assert found == expected


def _intersect(plan: Plan, source: int, send: Kind, target: int, receive: Kind) -> list[tuple[int, Action]]:
    """Row by row: who sends what to whom between two ministages, at both ends."""
    result = []
    for sender, its in plan.group_of(source).microbatches_by_rank.items():
        for receiver, theirs in plan.group_of(target).microbatches_by_rank.items():
            for i, mine in enumerate(its):
                for j, other in enumerate(theirs):
                    rows = sorted(set(range(mine.start, mine.stop)) & set(range(other.start, other.stop)))
                    if rows:
                        first, last = rows[0], rows[-1] + 1
                        result.append((sender, Action(send, source, i, receiver, first, last)))
                        result.append((receiver, Action(receive, target, j, sender, first, last)))
    return result
