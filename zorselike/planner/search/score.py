"""Which of two plans is better: by what is asked for, within what is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering
from math import inf, isclose

from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.problem import PlanProblem

OF_REPLICAS = 3
"""What tensor parallelism in a group counts there."""
_ALIKE = 1e-9
"""Relative difference below which two times are the same."""


@total_ordering
@dataclass(frozen=True)
class Score:
    """How good a plan is: the least score is the best."""

    excess: float
    """By how much constraints are broken, relative to them; 0 where they are kept."""
    wanted: float
    """What is to be little: seconds, or money."""
    other: float
    """What is to be little besides."""
    num_devices: int = 0
    complexity: int = 0
    """What a person has to think of (`Mode.complexity`), of all groups; tensor parallelism too."""

    def __lt__(self, other: Score) -> bool:
        theirs_all = (other.excess, other.wanted, other.other)
        for mine, theirs in zip((self.excess, self.wanted, self.other), theirs_all, strict=True):
            if not isclose(mine, theirs, rel_tol=_ALIKE):
                return mine < theirs
        return (self.num_devices, self.complexity) < (other.num_devices, other.complexity)

    @property
    def is_allowed(self) -> bool:
        return self.excess == 0


WORST = Score(inf, inf, inf)


def score(problem: PlanProblem, iteration_s: float, cost: float, candidate: CandidatePlan) -> Score:
    """The score of a candidate with such steps."""
    excess = max(0.0, problem.min_throughput * iteration_s - 1)
    if cost > problem.max_cost_per_iteration:
        excess += cost / problem.max_cost_per_iteration - 1
    wanted, other = (iteration_s, cost) if problem.objective == "throughput" else (cost, iteration_s)
    complexity = sum(group.mode.complexity + OF_REPLICAS * (group.degree > 1) for group in candidate.groups)
    return Score(excess, wanted, other, candidate.num_devices, complexity)
