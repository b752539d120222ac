"""What the search for a pipeline says where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from table_costs import POOLS, chain

from tools.papers.sailor.allocate import allocate
from zorselike.errors import ConfigError, PlanError
from zorselike.planner.pipelines.allocation import AllocationGoal, Problem
from zorselike.planner.pipelines.costs import Pool


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (AllocationGoal(min_throughput=10.0), "min_throughput 10 cannot be kept: 0.02"),
        (AllocationGoal(max_cost_per_iteration=1e-3), "max_cost_per_iteration 0.001 cannot be kept: 24"),
        (AllocationGoal(min_throughput=10.0, max_cost_per_iteration=1e-3), "0.0.* second on 2 dev.* 24"),
    ],
)
def test_a_refusal_says_how_near_the_best_comes(goal: AllocationGoal, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        allocate([Problem(1, 1, chain())], POOLS, goal)


def test_too_few_devices_are_said_to_be() -> None:
    problem = Problem(1, 1, chain(memory=(5.0, 5.0)))
    with pytest.raises(PlanError, match="max_devices 1 is too few; 2 are used without it"):
        allocate([problem], POOLS, AllocationGoal(max_devices=1))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="memory"):
        allocate([Problem(1, 1, chain(memory=(0.5, 0.5)))], POOLS)


@pytest.mark.parametrize(
    ("problems", "pools", "message"),
    [
        ([Problem(1, 1, chain())], [replace(pool, num_devices=0) for pool in POOLS], "fast, slow"),
        ([], POOLS, "too small"),
        ([Problem(1, 1, chain())], POOLS[:1], "all 1 pools"),
    ],
)
def test_nothing_to_plan_for_is_refused(problems: list[Problem], pools: list[Pool], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        allocate(problems, pools)
