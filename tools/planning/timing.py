"""How long a search takes on one core, and how much memory, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from zorselike.cost.curves import CurveWarning
from zorselike.planner.answer import Progress
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.search import search_plans

NEAR = 0.01
"""So near to the end's best, the search had found nearly all that it finds."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One search."""

    wall_s: float
    cpu_s: float
    near_s: float
    """Until a plan within `NEAR` of the last best was known."""
    num_estimated: int
    num_simulated: int
    step_s: float
    gap: float
    share_of_ideal: float
    ending: str
    peak_bytes: int
    """Resident at most, of the whole process."""
    num_devices: int
    num_used: int
    grouping: str
    plan: str


def time_search(make: Callable[[], PlanProblem], budget_s: float) -> Timing:
    """Times a search in a fresh process on one core, without torch; raises what the search raises."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_run, (make, budget_s))


def _run(make: Callable[[], PlanProblem], budget_s: float) -> Timing:
    if hasattr(os, "sched_setaffinity"):  # Linux.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    # Of the authors' times some fall by a few percent where more is computed; curves repair them.
    warnings.simplefilter("ignore", CurveWarning)
    problem = make()
    seen: list[Progress] = []
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    answer = search_plans(problem, budget_s=budget_s, on_progress=seen.append)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    best = answer.best
    step_s = best.case.simulation.iteration_s
    near = (own.elapsed_s for own in seen if own.best_s is not None and own.best_s <= step_s * (1 + NEAR))
    return Timing(
        wall_s=wall_s,
        cpu_s=cpu_s,
        near_s=next(near, wall_s),
        num_estimated=answer.progress.num_estimated,
        num_simulated=answer.progress.num_simulated,
        step_s=step_s,
        gap=answer.gap,
        share_of_ideal=best.share_of_ideal,
        ending=answer.ending,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        num_devices=problem.cluster.num_devices,
        num_used=best.case.plan.num_ranks,
        grouping=best.grouping,
        plan=best.case.plan.explain(),
    )
