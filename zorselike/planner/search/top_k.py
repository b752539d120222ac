"""Candidates that were simulated, and the best of them."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from zorselike.errors import ClusterError, ProfileError
from zorselike.planner.candidate.candidate import Sketch
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.to_plan import make_plan
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.budget import Effort
from zorselike.planner.search.explore import Candidate
from zorselike.planner.search.score import Rank, rank
from zorselike.schedule.orders.in_flight import LowBoundError
from zorselike.simulator.simulated_plan import SimulatedPlan

MOST_FINALISTS = 16
"""Sketches that are simulated before the best are changed."""
WORTH_SIMULATING = 1.3
"""Estimates up to this many times the best one's are simulated."""
MANY_ACTIONS, WORTH_OF_HALF, WORTH_IN_A_HURRY = 20_000, 0.02, 0.1
"""Beyond so many actions a candidate with half of them is simulated first if it takes no longer than by this
share; by the larger share where the simulation would end after the budget."""


class Finalist(NamedTuple):
    """A candidate whose step was simulated."""

    rank: Rank
    number: int
    """Which one, in the order of simulation."""
    candidate: Candidate
    case: SimulatedPlan
    is_first_step: bool
    """Whether its time is that of a step that all ranks begin together, for want of time for more: it is a
    little longer than that of steps that overlap."""


def _put_kinds_first(ordered: list[Candidate]) -> list[Candidate]:
    """The best with and the best without bounds on microbatches in flight before all others: estimates of the
    two err in different ways."""
    first = {own.choice.slack is None: own for own in reversed(ordered)}
    return sorted(ordered, key=lambda own: all(own is not other for other in first.values()))


class Finalists:
    """Simulates candidates, each sketch once."""

    def __init__(self, problem: PlanProblem, table: LayerTable, effort: Effort) -> None:
        self._problem, self._table, self._effort = problem, table, effort
        self._found: dict[Sketch, Finalist | None] = {}
        self.best: Finalist | None = None

    def __contains__(self, sketch: Sketch) -> bool:
        return sketch in self._found

    def forget(self) -> None:
        self._found.clear()
        self.best = None

    def sort(self) -> list[Finalist]:
        """All, the best first."""
        return sorted(own for own in self._found.values() if own is not None)

    def simulate_best(self, candidates: list[Candidate]) -> None:
        """The best by estimate, one in any case. Of those that are about as good, one with few actions comes
        first, which is as good to run and quicker to simulate."""
        ordered = _put_kinds_first(sorted(candidates, key=lambda own: (own.rank.excess, self._weigh(own))))
        limit = WORTH_SIMULATING * ordered[0].rank.wanted if ordered else 0.0
        for number, candidate in enumerate(ordered):
            if self.best is not None and self._effort.is_over():
                return
            if self.best is not None and self.best.rank.is_allowed and not self._effort.is_tiny():
                if candidate.rank.wanted > limit:
                    return
                if number >= MOST_FINALISTS and not self._effort.is_little():
                    return
            self.simulate(candidate)

    def simulate(self, candidate: Candidate) -> Finalist | None:
        """None where its ranks are not joined, or where it would take too long and there are others."""
        sketch = candidate.sketch
        if sketch not in self._found:
            is_needed = self.best is None or not self.best.rank.is_allowed
            if not is_needed and self._effort.would_overrun(sketch.num_actions):
                return None
            self._found[sketch] = self._run(candidate)
        found = self._found[sketch]
        if found is not None and (self.best is None or found.rank < self.best.rank):
            self.best = found
        return found

    def _run(self, candidate: Candidate) -> Finalist | None:
        effort = self._effort
        began_s = effort.elapsed_s
        try:
            plan = make_plan(candidate.sketch, self._problem, self._table).validate()
            hurries = effort.must_hurry(candidate.sketch.num_actions)
            case = self._problem.setting.simulate(plan, num_steps=1 if hurries else None)
        except (ClusterError, ProfileError, LowBoundError):
            return None
        effort.count_simulation(
            actions=sum(map(len, case.actions.values())),
            estimated_actions=candidate.sketch.num_actions,
            seconds=effort.elapsed_s - began_s,
            is_one_step=hurries,
        )
        simulation = case.simulation
        order = rank(self._problem, simulation.iteration_s, simulation.cost, plan.num_ranks)
        return Finalist(order, effort.num_simulated, candidate, case, hurries)

    def _weigh(self, candidate: Candidate) -> float:
        """What is wanted little of, and more of it for many actions."""
        num_actions = candidate.sketch.num_actions
        doublings = max(0.0, log2(max(1, num_actions) / MANY_ACTIONS))
        worth = WORTH_IN_A_HURRY if self._effort.must_hurry(num_actions) else WORTH_OF_HALF
        return candidate.rank.wanted * (1 + worth * doublings)
