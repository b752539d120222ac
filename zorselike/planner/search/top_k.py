"""Candidates that were simulated, and the best of them."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from zorselike.cost.step_costs import StepCosts
from zorselike.errors import ClusterError, ProfileError
from zorselike.plan.plan import Plan
from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.to_plan import make_plan
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.budget import SearchBudget
from zorselike.planner.search.evaluator import EstimatedCandidate
from zorselike.planner.search.score import Score, score
from zorselike.schedule.orders.in_flight import LowBoundError
from zorselike.simulator.classes.rank_classes import RankClasses
from zorselike.simulator.simulated_plan import SimulatedPlan

MOST_SIMULATED = 16
"""Candidates that are simulated before the best are changed."""
WORTH_SIMULATING = 1.3
"""Estimates up to this many times the best one's are simulated."""
MANY_ACTIONS, WORTH_OF_HALF, WORTH_IN_A_HURRY = 20_000, 0.02, 0.1
"""Beyond so many actions a candidate with half of them is simulated first if it takes no longer than by this
share; by the larger share where the simulation of the best by estimate would end after the budget."""


class SimulatedCandidate(NamedTuple):
    """A candidate whose step was simulated."""

    score: Score
    number: int
    """Which one, in the order of simulation."""
    estimated: EstimatedCandidate
    case: SimulatedPlan
    is_first_step: bool
    """Whether its time is that of a step that all ranks begin together, for want of time for more: it is a
    little longer than that of steps that overlap."""


def _put_kinds_first(ordered: list[EstimatedCandidate]) -> list[EstimatedCandidate]:
    """The best with and the best without bounds on microbatches in flight before all others: estimates of the
    two err in different ways."""
    first = {candidate.choice.in_flight_factor is None: candidate for candidate in reversed(ordered)}
    return sorted(ordered, key=lambda candidate: all(candidate is not other for other in first.values()))


def _weigh(estimated: EstimatedCandidate, worth_of_half: float) -> float:
    """What is wanted little of, and more of it for many actions."""
    doublings = max(0.0, log2(max(1, estimated.candidate.num_actions) / MANY_ACTIONS))
    return estimated.score.wanted * (1 + worth_of_half * doublings)


class _Task(NamedTuple):
    """A candidate ready to be simulated."""

    plan: Plan
    costs: StepCosts
    classes: RankClasses | None
    num_actions: int
    """About how many are to be simulated."""

    @classmethod
    def of(cls, candidate: CandidatePlan, problem: PlanProblem, table: LayerTable) -> _Task:
        plan = make_plan(candidate, problem, table)
        costs = problem.setting.find_costs(plan)
        classes = problem.setting.find_classes(plan, costs)
        share = 1.0 if classes is None else len(classes.members) / plan.num_ranks
        return cls(plan, costs, classes, round(share * candidate.num_actions))


class TopK:
    """Simulates candidates, each once."""

    def __init__(self, problem: PlanProblem, table: LayerTable, budget: SearchBudget) -> None:
        self._problem, self._table, self._budget = problem, table, budget
        self._found: dict[CandidatePlan, SimulatedCandidate | None] = {}
        self._tasks: dict[CandidatePlan, _Task] = {}
        self.best: SimulatedCandidate | None = None

    def __contains__(self, candidate: CandidatePlan) -> bool:
        return candidate in self._found

    def forget(self) -> None:
        self._found.clear()
        self.best = None

    def sort(self) -> list[SimulatedCandidate]:
        """All, the best first."""
        return sorted(own for own in self._found.values() if own is not None)

    def simulate_best(self, candidates: list[EstimatedCandidate]) -> None:
        """The best by estimate, one in any case. Of those that are about as good, one with few actions comes
        first, which is as good to run and quicker to simulate."""
        best = min(candidates, key=lambda one: one.score, default=None)
        hurries = best is not None and self._budget.must_hurry(self.count_actions(best.candidate))
        worth = WORTH_IN_A_HURRY if hurries else WORTH_OF_HALF
        weighed = sorted(candidates, key=lambda one: (one.score.excess, _weigh(one, worth)))
        ordered = _put_kinds_first(weighed)
        limit = WORTH_SIMULATING * ordered[0].score.wanted if ordered else 0.0
        for number, estimated in enumerate(ordered):
            if self.best is not None and self._budget.is_over():
                return
            if self.best is not None and self.best.score.is_allowed and not self._budget.is_tiny():
                if estimated.score.wanted > limit:
                    return
                if number >= MOST_SIMULATED and not self._budget.is_little():
                    return
            self.simulate(estimated)

    def simulate(self, estimated: EstimatedCandidate) -> SimulatedCandidate | None:
        """None where its ranks are not joined, or where it would take too long and there are others."""
        candidate = estimated.candidate
        if candidate not in self._found:
            self._found[candidate] = None
            try:
                task = self._prepare(candidate)
                is_needed = self.best is None or not self.best.score.is_allowed
                if not is_needed and self._budget.would_overrun(task.num_actions):
                    del self._found[candidate]
                    return None
                self._found[candidate] = self._run(estimated, task)
            except (ClusterError, ProfileError, LowBoundError):
                pass
        found = self._found[candidate]
        if found is not None and (self.best is None or found.score < self.best.score):
            self.best = found
        return found

    def count_actions(self, candidate: CandidatePlan) -> int:
        """About how many are simulated, of ranks that are alike those of one."""
        if candidate.num_actions < MANY_ACTIONS:
            return candidate.num_actions
        try:
            return self._prepare(candidate).num_actions
        except (ClusterError, ProfileError, LowBoundError):
            return candidate.num_actions

    def _prepare(self, candidate: CandidatePlan) -> _Task:
        if candidate not in self._tasks:
            self._tasks[candidate] = _Task.of(candidate, self._problem, self._table)
        return self._tasks[candidate]

    def _run(self, estimated: EstimatedCandidate, task: _Task) -> SimulatedCandidate:
        budget = self._budget
        began_s = budget.elapsed_s
        hurries = budget.must_hurry(task.num_actions)
        case = self._problem.setting.simulate(
            task.plan, task.costs, num_steps=1 if hurries else None, classes=task.classes
        )
        simulation = case.simulation
        budget.count_simulation(
            actions=simulation.num_actions,
            estimated_actions=task.num_actions,
            seconds=budget.elapsed_s - began_s,
            is_one_step=hurries,
        )
        order = score(self._problem, simulation.iteration_s, simulation.cost, task.plan.num_ranks)
        return SimulatedCandidate(order, budget.num_simulated, estimated, case, hurries)
