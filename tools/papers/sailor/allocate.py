"""The search for a pipeline, with what a person wants to know where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from zorselike.errors import ConfigError, PlanError
from zorselike.planner.pipelines.allocation import Allocation, AllocationGoal, Problem, find_allocation
from zorselike.planner.pipelines.costs import Pool


def allocate(
    problems: Iterable[Problem], pools: Sequence[Pool], goal: AllocationGoal | None = None
) -> Allocation:
    """The pipeline that is fastest, or cheapest, within the goal's constraints.

    Raises:
        ConfigError: There are no devices, or no problems (a batch too small for any degree).
        PlanError: No pipeline is within memory and constraints; says how near the best ones come.
    """
    goal = goal or AllocationGoal()
    problems = tuple(problems)
    _check(problems, pools)
    found = find_allocation(problems, pools, goal)
    if found is None:
        raise PlanError(_explain_refusal(problems, pools, goal))
    return found


def _check(problems: Sequence[Problem], pools: Sequence[Pool]) -> None:
    if not any(pool.num_devices for pool in pools):
        names = ", ".join(pool.name for pool in pools) or "none given"
        raise ConfigError(f"no devices in any pool ({names}); raise a quota above 0")
    if not problems:
        raise ConfigError("no degree of data parallelism to plan for; the batch is too small for any")
    for problem in problems:
        if any(len(uses) != len(pools) for uses in problem.costs.uses):
            raise ConfigError(f"an option at degree {problem.degree} does not name all {len(pools)} pools")


def _explain_refusal(problems: Sequence[Problem], pools: Sequence[Pool], goal: AllocationGoal) -> str:
    """Which constraint is at fault: the best without it, the others kept."""
    if goal.min_throughput and (
        found := find_allocation(problems, pools, replace(goal, objective="throughput", min_throughput=0.0))
    ):
        return (
            f"min_throughput {goal.min_throughput:g} cannot be kept: {found.throughput:.4g} iterations "
            "a second is the most within the other constraints; lower it or raise quotas"
        )
    if goal.max_cost_per_iteration < inf and (
        found := find_allocation(problems, pools, replace(goal, objective="cost", max_cost_per_iteration=inf))
    ):
        return (
            f"max_cost_per_iteration {goal.max_cost_per_iteration:g} cannot be kept: "
            f"{found.figures.dollars:.4g} dollars is the least within the other constraints; raise it"
        )
    if goal.max_devices is not None and (
        found := find_allocation(problems, pools, replace(goal, max_devices=None))
    ):
        used = sum(found.figures.used)
        return f"max_devices {goal.max_devices} is too few; {used} are used without it: raise it"
    fastest = find_allocation(problems, pools, AllocationGoal(bill_idle=goal.bill_idle))
    cheapest = find_allocation(problems, pools, AllocationGoal(objective="cost", bill_idle=goal.bill_idle))
    if fastest is None or cheapest is None:
        return "no pipeline fits in the devices' memory; raise quotas or take smaller microbatches"
    return (
        "the constraints cannot be kept, not even without one of them: without any, the fastest pipeline "
        f"makes {fastest.throughput:.4g} iterations a second on {sum(fastest.figures.used)} devices and the "
        f"cheapest costs {cheapest.figures.dollars:.4g} dollars an iteration; ease several"
    )
