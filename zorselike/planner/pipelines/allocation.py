"""Which devices a job should have at all, and as what pipeline (Sailor section 4.2).

From quotas by type and zone, for throughput or for money. Every stage has as many replicas, which is the
degree of data parallelism; every degree and microbatch size is a problem of its own. Microbatch counts round
up, so that throughput is a saw-tooth in the degree: none is left out by a stop rule (Sailor's H3, H4), only
by a lower bound that the best pipeline so far meets. Within the costs given, the result is the best there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from zorselike.planner.pipelines.bounds import Bounds, Floors
from zorselike.planner.pipelines.costs import Figures, PipelineCosts, Pool, Rent, Stage
from zorselike.planner.pipelines.search import Incumbent, PipelineSearch


@dataclass(frozen=True, kw_only=True)
class AllocationGoal:
    """What is wanted, and within what."""

    objective: Literal["throughput", "cost"] = "throughput"
    max_cost_per_iteration: float = inf
    """Dollars."""
    min_throughput: float = 0.0
    """Iterations a second."""
    max_devices: int | None = None
    bill_idle: bool = True
    """Idle devices of a rented node are paid for."""


@dataclass(frozen=True)
class Problem:
    """One degree of data parallelism and one microbatch size."""

    degree: int
    rows: int
    """Rows of a microbatch."""
    costs: PipelineCosts


@dataclass(frozen=True)
class Allocation:
    """The best pipeline of all problems."""

    problem: Problem
    stages: tuple[Stage, ...]
    figures: Figures
    is_exact: bool = True
    """Whether nothing better exists; False where the search ended early."""


def find_allocation(
    problems: Sequence[Problem], pools: Sequence[Pool], goal: AllocationGoal, *, max_tried: float = inf
) -> Allocation | None:
    """The pipeline that is fastest, or cheapest, within the goal's constraints; None where none is within
    memory and constraints.

    Args:
        problems: by rising bound they are searched, the bounds made tighter before.
        pools: as many as their options name.
        goal: what is wanted.
        max_tried: of partial pipelines, after which the search ends with the best so far.
    """
    incumbent = Incumbent(
        minimise_dollars=goal.objective == "cost",
        max_s=1 / goal.min_throughput if goal.min_throughput else inf,
        max_dollars=goal.max_cost_per_iteration,
        max_devices=inf if goal.max_devices is None else goal.max_devices,
        max_tried=max_tried,
    )
    rent = Rent(tuple(pools), goal.bill_idle)
    waiting: list[tuple[float, bool, int]] = []
    bounds = [Bounds(problem.costs, pools) for problem in problems]
    floors: dict[int, Floors] = {}

    def wait(i: int, found: Floors | None, is_tight: bool) -> None:
        if found is not None and incumbent.allows(found.iteration_s, found.device_dollars):
            floors[i] = found
            key = found.device_dollars if incumbent.minimise_dollars else found.iteration_s
            heapq.heappush(waiting, (key, is_tight, i))

    for i, bound in enumerate(bounds):
        wait(i, bound.rough(), False)
    while waiting and not incumbent.is_exhausted:
        _, is_tight, i = heapq.heappop(waiting)
        if not incumbent.allows(floors[i].iteration_s, floors[i].device_dollars):
            continue
        if is_tight:
            PipelineSearch(i, bounds[i], rent, incumbent).run(floors[i])
        else:
            wait(i, bounds[i].tight(floors[i].slowest_straggler_s(incumbent.slowest_s)), True)
    if incumbent.figures is None:
        return None
    return Allocation(
        problem=problems[incumbent.problem],
        stages=incumbent.stages,
        figures=incumbent.figures,
        is_exact=not incumbent.is_exhausted,
    )
