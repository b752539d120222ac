"""The search for the best plan (Zorse 4.3, Sailor 4.2).

Sets of devices, their groupings and the orders of groups are looked at in the order of what they promise;
for each, rows, layers, modes, microbatches and ministages are decided by an estimate of the step
(`planner/estimate/step_time.py`) and the memory walk. The most promising are simulated, and the
best of them changed step by step until nothing improves. What is done is counted, not timed: an answer is
the same each time unless the budget ends it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import islice
from math import isfinite

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.errors import ProfileError
from zorselike.plan.plan import Estimates
from zorselike.planner.answer import Ending, NothingFitsError, OnProgress, PlanAnswer, Planned, Progress
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.structure import Structure, Structures
from zorselike.planner.devices.bounds import DeviceBounds
from zorselike.planner.devices.choose import propose_devices
from zorselike.planner.estimate.memory import RankMemory
from zorselike.planner.estimate.step_time import StepTimeEstimate
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.budget import FUTILE_S, SearchBudget
from zorselike.planner.search.builder import CandidateBuilder, Groups
from zorselike.planner.search.coarse_search import CoarseSearch
from zorselike.planner.search.enumerator import CandidateEnumerator
from zorselike.planner.search.evaluator import CandidateEvaluator, EstimatedCandidate
from zorselike.planner.search.local_search import LocalSearch
from zorselike.planner.search.nothing_fits import describe_nothing
from zorselike.planner.search.top_k import SimulatedCandidate, TopK
from zorselike.simulator.garbage import without_collection
from zorselike.simulator.report.limits import describe_limit
from zorselike.simulator.simulated_plan import SimulatedPlan

TIGHTER = 0.9
"""Share of the memory that is planned with where whole plans turn out not to fit."""
FEW_SETS, FEW_GROUPINGS = 2, 2
"""Sets of devices, and groupings of each, in which is looked for what would fit with more memory."""
LIMITING_SHARE = 0.7
"""Below this share of the ideal a plan says what limits it."""
ONE_STEP = (
    "the time is that of one step from a standing start, since simulating several would have taken longer "
    "than the budget; steps that follow each other may be a little faster"
)


@without_collection()
def search_plans(
    problem: PlanProblem,
    *,
    budget_s: float = 30.0,
    top: int = 5,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> PlanAnswer:
    """The best plans found within a time; one that fits is returned however short the time is.

    Args:
        problem: what is asked.
        budget_s: after so many seconds the best so far is returned; Ctrl-C does the same at once.
        top: how many plans, the best first; those after it differ from it in groups or modes.
        seed: of the order in which small changes are tried.
        on_progress: is told every now and then how far it is.

    Raises:
        ConfigError: The problem contradicts itself.
        NothingFitsError: No plan fits, or none keeps the constraints; says the smallest change that would.
        ProfileError: Nothing is known of the speed of any device.
        ClusterError: Nothing says how devices are connected.
    """
    problem.check()
    return _Search(problem, budget_s, seed, on_progress).run(top)


class _Search:
    def __init__(
        self, problem: PlanProblem, budget_s: float, seed: int, on_progress: OnProgress | None
    ) -> None:
        self._on_progress = on_progress
        self._budget = budget = SearchBudget(budget_s, self._tell)
        self._notes: list[str] = []
        self._clock = LayerTimeModel(problem.profile, problem.workload)
        self._problem = problem = self._leave_out_unknown(problem)
        table = LayerTable(problem.workload, self._clock)
        step_time = StepTimeEstimate(problem, table)
        self._memory = RankMemory(problem, table, self._clock.kept_bytes)
        builder = CandidateBuilder(problem, table, step_time, self._memory)
        self._bounds = DeviceBounds(problem, self._clock)
        self._evaluator = CandidateEvaluator(
            problem, builder, step_time, self._bounds.price_per_hour, budget.is_enumeration_over
        )
        self._top_k = TopK(problem, table, budget)
        self._enumerator = CandidateEnumerator(
            problem, self._evaluator, self._bounds, budget, self._top_k.count_actions
        )
        self._local_search = LocalSearch(problem, self._evaluator, self._top_k, budget, seed)

    def _leave_out_unknown(self, problem: PlanProblem) -> PlanProblem:
        """Without devices of which nothing says how fast they are, such as those without this dtype."""
        types = problem.device_types
        unknown: dict[str, ProfileError] = {}
        for device in dict.fromkeys(types[d] for d in problem.usable):
            try:
                for kind in problem.workload.kinds:
                    self._clock.forward_s(kind, device, 1, "none")
            except ProfileError as error:
                unknown[device] = error
        if not unknown:
            return problem
        known = tuple(d for d in problem.usable if types[d] not in unknown)
        given = {d for group in problem.fixed.groups or () for d in group}
        if not known or given - {*known}:
            raise next(iter(unknown.values()))
        self._notes += [f"{device} left out: {error}" for device, error in unknown.items()]
        return replace(problem, devices=known)

    def _progress(self) -> Progress:
        best = None if self._top_k.best is None else self._top_k.best.case.simulation
        return Progress(
            elapsed_s=self._budget.elapsed_s,
            num_estimated=self._evaluator.num_estimated,
            num_simulated=self._budget.num_simulated,
            best_s=None if best is None else best.iteration_s,
            best_cost=None if best is None else best.cost,
            bound_s=self._bounds.floor_s,
        )

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._progress())

    # -- the whole -------------------------------------------------------------------------

    def run(self, top: int) -> PlanAnswer:
        ending = self._look()
        plans = self._choose(top)
        if not plans:  # What was walked in parts fits, and the whole plans do not, by a little.
            self._memory.scale = TIGHTER
            for part in (self._evaluator, self._enumerator, self._top_k):
                part.forget()
            ending = self._look()
            plans = self._choose(top)
        if not plans:
            self._memory.scale = 1.0
            raise NothingFitsError(self._explain_nothing())
        assert self._top_k.best is not None
        candidate = self._top_k.best.estimated.candidate
        used = {device for group in candidate.groups for device in group.devices}
        seen = (own.note for own in self._enumerator.sets_seen if own.note and used <= {*own.devices})
        self._notes += islice(seen, 1)
        if self._top_k.best.is_first_step:
            self._notes.append(ONE_STEP)
        self._tell()
        return PlanAnswer(
            plans=plans, progress=self._progress(), ending=ending, notes=tuple(dict.fromkeys(self._notes))
        )

    def _look(self) -> Ending:
        """Finds candidates, simulates the best and improves them."""
        ending: Ending = "finished"
        try:
            self._enumerator.enumerate()
            self._simulate_best()
            self._local_search.improve()
        except KeyboardInterrupt:
            if not self._enumerator.found:
                raise
            ending = "interrupted"
            self._budget.budget_s = 0.0
            self._simulate_best()
        if ending == "finished" and self._budget.is_cut:
            ending = "budget"
        return ending

    def _simulate_best(self) -> None:
        self._top_k.simulate_best(list(self._enumerator.found.values()))
        if self._top_k.best is None:  # There may have been no time to come to what needs least memory.
            frugal = self._find_any(self._budget.worked_s + FUTILE_S)
            self._top_k.simulate_best([] if frugal is None else [frugal])
        if self._top_k.best is None:
            raise NothingFitsError(self._explain_nothing())

    # -- the answer ------------------------------------------------------------------------

    def _choose(self, top: int) -> tuple[Planned, ...]:
        """The best that fit, each with other groups or modes than those before."""
        chosen: list[Planned] = []
        structures = Structures(self._problem)
        seen: set[Structure] = set()
        assert self._top_k.best is not None
        refused: SimulatedCandidate | None = None
        first_score = self._top_k.best.score
        simulated = self._top_k.sort()
        for found in [self._top_k.best, *simulated]:
            structure = structures.describe(found.estimated.candidate, found.case.simulation.iteration_s)
            if structure & seen or not self._fits(found.case):
                continue
            if chosen and found.score < first_score:
                continue  # Hardly better than the first, and less simple.
            if not found.score.is_allowed:
                refused = refused or found
                continue
            seen |= structure
            first_score = first_score if chosen else found.score
            chosen.append(self._finish(found))
            if len(chosen) == max(1, top):
                break
        if not chosen and refused is not None:
            raise NothingFitsError(self._explain_refused(refused))
        return tuple(chosen)

    def _explain_refused(self, found: SimulatedCandidate) -> str:
        """Where plans fit, and none keeps what is asked for."""
        simulation, problem = found.case.simulation, self._problem
        asked = []
        if isfinite(problem.max_cost_per_iteration):
            asked.append(
                f"at most {problem.max_cost_per_iteration:g} {problem.cluster.currency} an iteration"
            )
        if problem.min_throughput:
            asked.append(f"at least {problem.min_throughput:g} iterations/s")
        return (
            f"plan: none of the {self._budget.num_simulated} plans that were simulated keeps "
            f"{' and '.join(asked)}; the nearest costs {simulation.cost:.4g} {problem.cluster.currency} an "
            f"iteration and makes "
            f"{1 / simulation.iteration_s:.4g} iterations/s; ease what is asked for, or search longer"
        )

    def _fits(self, case: SimulatedPlan) -> bool:
        """By the walk over every rank's actions."""
        ranks = range(case.plan.num_ranks)
        return not any(map(case.is_overfull, ranks)) and not any(map(case.is_host_overfull, case.host_bytes))

    def _finish(self, found: SimulatedCandidate) -> Planned:
        case, simulation = found.case, found.case.simulation
        devices = [device for group in found.estimated.candidate.groups for device in group.devices]
        ideal_s = self._bounds.bound_s(devices)
        share = ideal_s / simulation.iteration_s
        estimates = Estimates(
            iteration_s=simulation.iteration_s,
            cost_per_iteration=simulation.cost if simulation.cost else None,
            peak_memory_bytes=case.peak_bytes,
            share_of_ideal=share,
            limited_by=tuple(describe_limit(case)) if share < LIMITING_SHARE else (),
        )
        plan = replace(case.plan, estimates=estimates).validate()
        return Planned(replace(case, plan=plan), found.estimated.grouping, ideal_s, found.is_first_step)

    def _find_any(self, end_s: float) -> EstimatedCandidate | None:
        """Whatever fits first in a few likely groupings."""
        self._evaluator.forget()
        for groups, name in self._likely_groups:
            if self._budget.worked_s > end_s:
                break
            search = CoarseSearch(self._evaluator, groups, name)
            found = search.find_any(in_flight=bool(self._problem.fixed.bounds_in_flight))
            if found is not None:
                return found
        return None

    @cached_property
    def _likely_groups(self) -> list[tuple[Groups, str]]:
        sets = propose_devices(self._problem, bounds=self._bounds)[:FEW_SETS]
        return [
            own for devices in sets for own in islice(self._enumerator.list_groups(devices), FEW_GROUPINGS)
        ]

    def _explain_nothing(self) -> str:
        end_s = self._budget.worked_s + max(FUTILE_S, 2 * self._budget.budget_s)
        return describe_nothing(
            self._problem, self._memory, lambda: self._find_any(end_s), lambda: self._budget.worked_s > end_s
        )
