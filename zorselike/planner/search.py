"""The search for the best plan (DESIGN section 9)."""

from __future__ import annotations

from zorselike.planner.answer import OnProgress, PlanAnswer
from zorselike.planner.problem import PlanProblem


def search_plans(
    problem: PlanProblem,
    *,
    budget_s: float = 30.0,
    top: int = 5,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> PlanAnswer:
    raise NotImplementedError
