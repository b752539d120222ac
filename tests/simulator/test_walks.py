"""Memory of ranks that do the same with other peers: walked once, and what each would have by itself."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import volume
from plain_costs import make_costs
from plans import random_plan

from zorselike.cost.memory import walk_memory
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.schedule import ScheduleSpec, build
from zorselike.schedule.contract import SENDS_KEPT_BY_NCCL
from zorselike.simulator import memory as walks
from zorselike.simulator.memory import MemoryWalks

SIZES = {"activation_bytes_per_row": 10, "shard_bytes": 7, "state_bytes": 20}


@pytest.mark.nightly
def test_shared_walks_are_those_of_each_rank() -> None:
    for seed in volume.part(range(60)):
        plan = random_plan(random.Random(seed), max_groups=3, max_ranks_per_group=4)
        actions = build(ScheduleSpec(plan))
        costs = replace(make_costs(plan, row_bytes=3, sizes=SIZES), communicator_bytes=5)
        found = MemoryWalks(plan, actions, costs)
        for rank in range(plan.num_ranks):
            alone = walk_memory(
                plan,
                rank,
                actions[rank],
                costs.sizes[rank],
                num_sends_kept=SENDS_KEPT_BY_NCCL,
                on_gpu=True,
                communicator_bytes=5,
            )
            assert found[rank] == alone, (seed, rank)


def test_ranks_that_are_alike_are_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[int] = []

    def count(plan: Plan, rank: int, *others: Any, **options: Any) -> Any:
        walked.append(rank)
        return walk_memory(plan, rank, *others, **options)

    monkeypatch.setattr(walks, "walk_memory", count)
    groups = tuple(
        Group(ranks, tuple(Microbatch(rank, i, i + 1) for i, rank in enumerate(ranks)), zero=1)
        for ranks in ((0, 1, 2, 3), (4, 5, 6, 7))
    )
    stages = (Ministage(0, ("layers.0",)), Ministage(1, ("layers.1",)))
    plan = Plan(4, groups, stages).validate()
    found = MemoryWalks(plan, build(ScheduleSpec(plan)), make_costs(plan, row_bytes=3, sizes=SIZES))
    assert len({walk.device_peak_bytes for walk in found[:4]}) == 1
    assert len(found[:]) == 8 and walked == [0, 4]
