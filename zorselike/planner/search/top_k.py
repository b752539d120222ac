"""Candidates that were simulated, and the best of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import NamedTuple

from zorselike.cost.step_costs import StepCosts
from zorselike.errors import ClusterError, ProfileError
from zorselike.plan.plan import Plan
from zorselike.planner.answer import Improvement
from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.to_plan import make_plan
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.budget import ASSUMED_S, SearchBudget
from zorselike.planner.search.evaluator import CandidateEvaluator, EstimatedCandidate
from zorselike.planner.search.found import FoundCandidates
from zorselike.planner.search.helpers import Helpers
from zorselike.planner.search.neighbours import list_first_moves
from zorselike.planner.search.score import Score, score
from zorselike.schedule.contract import NUM_STEPS
from zorselike.schedule.orders.in_flight import LowBoundError
from zorselike.simulator.classes.rank_classes import RankClasses
from zorselike.simulator.memory import MemoryWalks
from zorselike.simulator.result import Simulation
from zorselike.simulator.simulated_plan import SimulatedPlan

MOST_SIMULATED = 16
"""Candidates that are simulated because of their estimates; more where simulations are short, or where an
estimate is better than all of these."""
FEW_ACTIONS = 20_000
"""Up to so many a simulation is short whether ranks are alike or not."""
EACH_S, EACH_DEVICE_S = 4e-3, 2e-4
"""Nominal seconds of making a plan of a candidate and its costs, and for each of its devices."""
MANY_ACTIONS = 50_000
"""From so many on a simulation takes seconds, and one step has to do in place of several."""
FIRST_SHARE, MUCH_BETTER = 0.25, 0.95
"""The first comes before its turn, as if it took this share of its time, since an answer is wanted soon; and
so does what promises at most this share of what the best so far takes, for it is that which is improved."""
NEAR = 1.05
"""Times the best so far that may be expected of what is simulated, where that takes long: by more estimates
seldom err, once those of the same devices have shown by how much they do."""
LONG = 16
"""A simulation is long that takes longer than so many estimates: only then estimates decide how layers are
cut before it."""
MOST_KEPT = 16
"""Simulations that are kept whole."""
_UNKNOWN = (ClusterError, ProfileError, LowBoundError)


class SimulatedCandidate(NamedTuple):
    """A candidate whose step was simulated."""

    score: Score
    number: int
    """Which one, in the order of simulation."""
    estimated: EstimatedCandidate
    iteration_s: float
    cost: float
    is_first_step: bool
    """Whether its time is that of a step that all ranks begin together, for want of time for more: it is a
    little longer than that of steps that overlap."""


class _Task(NamedTuple):
    """A candidate ready to be simulated."""

    plan: Plan
    costs: StepCosts
    classes: RankClasses | None
    num_actions: int
    """About how many of one step are to be simulated."""

    @classmethod
    def of(cls, candidate: CandidatePlan, problem: PlanProblem, table: LayerTable) -> _Task:
        plan = make_plan(candidate, problem, table)
        costs = problem.setting.find_costs(plan)
        classes = problem.setting.find_classes(plan, costs)
        share = 1.0 if classes is None else len(classes.members) / plan.num_ranks
        return cls(plan, costs, classes, round(share * candidate.num_actions))

    @property
    def is_first_step(self) -> bool:
        return self.num_actions >= MANY_ACTIONS

    @property
    def all_actions(self) -> int:
        """Of all steps that are simulated."""
        return _count_actions(self.num_actions)


def _count_actions(num_actions: int) -> int:
    """Of all steps that are simulated of a candidate with so many in one."""
    return num_actions if num_actions >= MANY_ACTIONS else NUM_STEPS * num_actions


def _count_seconds(candidate: CandidatePlan, num_actions: int) -> float:
    """Nominal seconds of simulating so many actions of a candidate."""
    return EACH_S + EACH_DEVICE_S * candidate.num_devices + ASSUMED_S * num_actions


class _Done(NamedTuple):
    """A simulation by a helper."""

    simulation: Simulation
    """Without memory, which is walked where it is asked for."""
    task_actions: int
    seconds: float
    is_first_step: bool


class TopK:
    """Simulates candidates, each once."""

    def __init__(
        self, problem: PlanProblem, table: LayerTable, budget: SearchBudget, num_helpers: int = 0
    ) -> None:
        """`num_helpers`: processes that simulate beforehand."""
        self._problem, self._table, self._budget = problem, table, budget
        self._helpers: Helpers[CandidatePlan, _Done | None] = Helpers(num_helpers, self._help)
        self._found: dict[CandidatePlan, SimulatedCandidate | None] = {}
        self._tasks: dict[CandidatePlan, _Task | None] = {}
        self._shares: dict[object, float] = {}
        """By replicas of groups, what is simulated of a candidate's actions where ranks that are alike are
        simulated once: about the same for all with these groups, and long to find."""
        self._cases: dict[object, tuple[SimulatedCandidate, SimulatedPlan | Simulation]] = {}
        """The best of each structure with all that was simulated of it, which takes much memory."""
        self._fits: dict[CandidatePlan, bool] = {}
        self.best: SimulatedCandidate | None = None
        """Of those that fit as they are walked whole."""
        self.improvements: list[Improvement] = []
        """How the best moved."""
        self.nominal_s = 0.0
        """Nominal seconds of all simulations (`turns.py`)."""

    def __contains__(self, candidate: CandidatePlan) -> bool:
        return candidate in self._found

    def forget(self) -> None:
        self._found.clear()
        self._tasks.clear()
        self._cases.clear()
        self._fits.clear()
        self.improvements.clear()
        self.best = None

    def sort(self) -> list[SimulatedCandidate]:
        """All, the best first."""
        return sorted(own for own in self._found.values() if own is not None)

    def simulate(self, estimated: EstimatedCandidate) -> SimulatedCandidate | None:
        """None where its ranks are not joined; raises `BudgetOverError` where it would take too long."""
        candidate = estimated.candidate
        if candidate not in self._found:
            done = self._helpers.take(candidate, self._budget.check)
            if done is None:
                self._found[candidate] = self._run(estimated)
            else:
                accepted = self._found[candidate] = self._accept(estimated, done)
                self._keep(accepted, done.simulation)
            self._tasks.pop(candidate, None)
        found = self._found[candidate]
        if found is not None and self._is_better(found):
            self._budget.may_stop = self._budget.may_stop or found.score.is_allowed
        if found is not None and self._is_better(found) and self.fits(found):
            self.best = found
            self.improvements.append(
                Improvement(
                    elapsed_s=self._budget.elapsed_s,
                    num_simulated=found.number,
                    iteration_s=found.iteration_s,
                    cost=found.cost,
                    num_devices=candidate.num_devices,
                )
            )
        return found

    def _is_better(self, found: SimulatedCandidate) -> bool:
        return self.best is None or found.score < self.best.score

    def expect_s(self, candidate: CandidatePlan) -> float:
        """Nominal seconds of its simulation, if it is still to come."""
        return 0.0 if candidate in self._found else self.nominal_of(candidate)

    def nominal_of(self, candidate: CandidatePlan) -> float:
        """Nominal seconds of a simulation."""
        if candidate.num_actions < FEW_ACTIONS:
            return _count_seconds(candidate, NUM_STEPS * candidate.num_actions)
        replicas = tuple((group.devices, group.degrees) for group in candidate.groups)
        groups = replicas, candidate.deals_otherwise
        if groups not in self._shares:
            task = self._prepare(candidate)
            if task is None:
                return 0.0
            self._shares[groups] = task.num_actions / candidate.num_actions
        return _count_seconds(candidate, _count_actions(round(self._shares[groups] * candidate.num_actions)))

    def is_long(self, candidate: CandidatePlan, estimate_s: float) -> bool:
        """Whether its simulation takes much longer than an estimate."""
        return self.nominal_of(candidate) > LONG * estimate_s

    def _prepare(self, candidate: CandidatePlan) -> _Task | None:
        if candidate not in self._tasks:
            try:
                self._tasks[candidate] = _Task.of(candidate, self._problem, self._table)
            except _UNKNOWN:
                self._tasks[candidate] = None
        return self._tasks[candidate]

    def _run(self, estimated: EstimatedCandidate) -> SimulatedCandidate | None:
        task = self._prepare(estimated.candidate)
        self._budget.check(0 if task is None else task.all_actions)
        if task is None:
            return None
        began_s = self._budget.elapsed_s
        try:
            case = self._simulate(task, self._budget.check)
        except _UNKNOWN:
            return None
        seconds = self._budget.elapsed_s - began_s
        done = _Done(case.simulation, task.all_actions, seconds, task.is_first_step)
        found = self._accept(estimated, done)
        self._keep(found, case)
        return found

    def _accept(self, estimated: EstimatedCandidate, done: _Done) -> SimulatedCandidate:
        simulation = done.simulation
        self.nominal_s += _count_seconds(estimated.candidate, done.task_actions)
        self._budget.count_simulation(
            actions=simulation.num_actions, expected_actions=done.task_actions, seconds=done.seconds
        )
        return SimulatedCandidate(
            score(self._problem, simulation.iteration_s, simulation.cost, estimated.candidate),
            self._budget.num_simulated,
            estimated,
            simulation.iteration_s,
            simulation.cost,
            done.is_first_step,
        )

    # -- helpers -------------------------------------------------------------------------------

    def offer(self, candidate: CandidatePlan) -> bool:
        """Lets a helper simulate what will be asked for soon; False where none has time."""
        if candidate in self._found:
            return True
        return len(self._helpers) > 0 and self._helpers.offer(candidate)

    def close(self) -> None:
        """Ends the helpers."""
        self._helpers.close()

    def _help(self, candidate: CandidatePlan) -> _Done | None:
        began_s = time.monotonic()
        try:
            task = _Task.of(candidate, self._problem, self._table)
            case = self._simulate(task)
        except _UNKNOWN:
            return None
        seconds = time.monotonic() - began_s
        return _Done(
            replace(case.simulation, memory=(), ranks=tuple(case.simulation.ranks)),
            task.all_actions,
            seconds,
            task.is_first_step,
        )

    # -- all of a simulation -----------------------------------------------------------------

    def fits(self, found: SimulatedCandidate) -> bool:
        """Whether it fits devices and hosts as the whole plan is walked: while candidates are built ranks are
        walked apart, and most are estimated by those before them."""
        candidate = found.estimated.candidate
        if candidate not in self._fits:
            self._fits[candidate] = self.find_case(found).fits
        return self._fits[candidate]

    def is_kept(self, found: SimulatedCandidate) -> bool:
        """Whether `find_case` takes no time."""
        kept = self._cases.get(_describe(found))
        return kept is not None and kept[0] is found

    def find_case(self, found: SimulatedCandidate) -> SimulatedPlan:
        """What was simulated of a candidate; simulated again where it was not kept."""
        kept = self._cases[_describe(found)][1] if self.is_kept(found) else None
        if kept is None:
            return self._simulate(_Task.of(found.estimated.candidate, self._problem, self._table))
        return self._complete(found, kept)

    def walk(self, candidate: CandidatePlan) -> SimulatedPlan | None:
        """All of a candidate, whether it fits or not; None where its ranks are not joined."""
        task = self._prepare(candidate)
        try:
            return None if task is None else self._simulate(task)
        except _UNKNOWN:
            return None

    def _complete(self, found: SimulatedCandidate, case: SimulatedPlan | Simulation) -> SimulatedPlan:
        """With actions and memory."""
        if isinstance(case, SimulatedPlan):
            return case
        task = _Task.of(found.estimated.candidate, self._problem, self._table)
        setting = self._problem.setting
        actions = setting.list_actions(task.plan)
        return SimulatedPlan(
            plan=task.plan,
            workload=setting.workload,
            cluster=setting.cluster,
            actions=actions,
            costs=task.costs,
            simulation=replace(case, memory=MemoryWalks(task.plan, actions, task.costs)),
            is_mirrored=setting.is_mirrored,
        )

    def _simulate(self, task: _Task, check: Callable[[], None] | None = None) -> SimulatedPlan:
        num_steps = 1 if task.is_first_step else None
        return self._problem.setting.simulate(
            task.plan, task.costs, num_steps=num_steps, classes=task.classes, check=check
        )

    def _keep(self, found: SimulatedCandidate, case: SimulatedPlan | Simulation) -> None:
        """If it is the best of its structure, and fits where it would be the best of all. `case`: where a
        helper has simulated it all but actions and memory."""
        if self._is_better(found):
            case = self._complete(found, case)
            self._fits[found.estimated.candidate] = case.fits
            if not case.fits:
                return
        key = _describe(found)
        if key not in self._cases or found.score < self._cases[key][0].score:
            self._cases[key] = found, case
        if len(self._cases) > MOST_KEPT:
            del self._cases[max(self._cases, key=lambda key: self._cases[key][0])]


def _describe(found: SimulatedCandidate) -> object:
    """What plans that are shown differ in."""
    candidate = found.estimated.candidate
    modes = (
        (group.devices, group.degrees, group.mode.zero, group.mode.recompute) for group in candidate.groups
    )
    return *modes, candidate.bounds_in_flight


class BestEstimates:
    """The best by estimate, simulated one after the other (`turns.Work`)."""

    def __init__(
        self, found: FoundCandidates, top_k: TopK, budget: SearchBudget, evaluator: CandidateEvaluator
    ) -> None:
        self._found, self._top_k, self._budget, self._evaluator = found, top_k, budget, evaluator
        self._moved: set[CandidatePlan] = set()
        """Those of which layers were moved."""
        self._moving_s = 0.0
        """Nominal seconds of that, which nothing was told of yet."""
        self.simulated: list[SimulatedCandidate] = []
        self._num_done = 0
        self._least: float | None = None
        """The best estimate of those that were simulated."""

    def _next(self) -> EstimatedCandidate | None:
        """What comes next once layers of its groups' first ministages were moved."""
        while (estimated := self._peek()) is not None and estimated.candidate not in self._moved:
            self._moved.add(estimated.candidate)
            estimate_s = self._evaluator.nominal_of(estimated.candidate.num_devices)
            if estimated.candidate.has_rounds and self._top_k.is_long(estimated.candidate, estimate_s):
                begin_s = self._evaluator.nominal_s
                moved = self._evaluator.move_layers(estimated, list_first_moves(estimated.candidate))
                self._moving_s += self._evaluator.nominal_s - begin_s
                self._moved.add(moved.candidate)
                self._found.keep(moved)
        return estimated

    def _peek(self) -> EstimatedCandidate | None:
        if not self._num_done:
            return self._found.peek_first(self._top_k.nominal_of)
        return self._found.peek(self._most)

    @property
    def _most(self) -> float:
        """What may be expected of what is simulated; infinite where estimates only say what comes first."""
        best = self._top_k.best
        if best is None or not best.score.is_allowed or self._budget.is_tiny:
            return inf
        return NEAR * best.score.wanted

    def peek(self) -> float | None:
        estimated = self._next()
        if estimated is None or not self._is_wanted(estimated):
            return None
        self._top_k.offer(estimated.candidate)
        return self._share(estimated) * self._top_k.expect_s(estimated.candidate)

    def advance(self) -> float:
        estimated, begin_s = self._next(), self._top_k.nominal_s
        assert estimated is not None, "peek found one"
        share = self._share(estimated)
        moving_s, self._moving_s = self._moving_s, 0.0
        self._found.take(estimated)
        self._num_done += 1
        wanted = estimated.score.wanted
        self._least = wanted if self._least is None else min(self._least, wanted)
        if (simulated := self._top_k.simulate(estimated)) is not None:
            self.simulated.append(simulated)
            self._found.learn(estimated, simulated.score.wanted)
        return share * (moving_s + self._top_k.nominal_s - begin_s)

    def _share(self, estimated: EstimatedCandidate) -> float:
        """What its time counts for."""
        best = self._top_k.best
        is_awaited = best is None or self._found.expect(estimated) < MUCH_BETTER * best.score.wanted
        return FIRST_SHARE if is_awaited else 1.0

    def _is_wanted(self, estimated: EstimatedCandidate) -> bool:
        if self._budget.is_spent:
            return False
        if self._most == inf:
            return True
        assert self._least is not None, "something was simulated"
        is_better = estimated.score.wanted < self._least
        return self._num_done < MOST_SIMULATED or self._budget.is_little or is_better
