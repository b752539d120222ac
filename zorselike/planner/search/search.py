"""The search for the best plan (Zorse 4.3, Sailor 4.2).

Sets of devices, their groupings and the orders of groups are looked at in the order of what they promise;
for each, rows, layers, modes, microbatches and ministages are decided by an estimate of the step
(`planner/estimate/step_time.py`) and the memory walk. The most promising are simulated, and the
best of them changed step by step until nothing improves. All of this goes on side by side (`turns.py`), in
an order that is counted, not timed: a longer budget does what a shorter one does and then more, so that its
answer is never worse, and an answer is the same each time unless the budget ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from itertools import islice
from math import isfinite

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.plan.plan import Estimates
from zorselike.planner.answer import Ending, NothingFitsError, OnProgress, PlanAnswer, Planned, Progress
from zorselike.planner.candidate.choice import Groups
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.structure import Structure, Structures
from zorselike.planner.devices.bounds import DeviceBounds
from zorselike.planner.devices.choose import leave_out_unknown, propose_devices
from zorselike.planner.estimate.memory import RankMemory
from zorselike.planner.estimate.step_time import StepTimeEstimate
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search.budget import FUTILE_S, BudgetOverError, SearchBudget
from zorselike.planner.search.builder import CandidateBuilder
from zorselike.planner.search.coarse_search import CoarseSearch
from zorselike.planner.search.enumerator import CoarseLooks, Refinements
from zorselike.planner.search.evaluator import CandidateEvaluator, EstimatedCandidate
from zorselike.planner.search.found import FoundCandidates
from zorselike.planner.search.local_search import LocalSearch
from zorselike.planner.search.nothing_fits import describe_nothing
from zorselike.planner.search.paying import choose_paying, describe_unused
from zorselike.planner.search.top_k import BestEstimates, SimulatedCandidate, TopK
from zorselike.planner.search.turns import Turns
from zorselike.simulator.garbage import without_collection
from zorselike.simulator.report.limits import describe_limit
from zorselike.simulator.simulated_plan import SimulatedPlan
from zorselike.text.wording import count

TIGHTER = 0.9
"""Share of the memory that is planned with where whole plans turn out not to fit."""
FEW_SETS, FEW_GROUPINGS = 2, 2
"""Sets of devices, and groupings of each, in which is looked for what would fit with more memory."""
COARSE_SHARE, REFINING_SHARE, SIMULATING_SHARE, IMPROVING_SHARE = 0.25, 0.25, 0.25, 0.25
"""Shares of all work."""
MOST_REPEATED = 4
"""Simulations that are repeated for the answer, at most: all of the best of each structure were kept."""
LIMITING_SHARE = 0.7
"""Below this share of the ideal a plan says what limits it."""
ONE_STEP = (
    "the time is that of one step from a standing start, since simulating several of so many actions takes "
    "long; steps that follow each other may be a little faster"
)


@without_collection()
def search_plans(
    problem: PlanProblem,
    *,
    budget_s: float = 30.0,
    top: int = 5,
    seed: int = 0,
    on_progress: OnProgress | None = None,
    all_devices: bool = False,
    workers: int = 1,
) -> PlanAnswer:
    """The best plans found within a time; one that fits is returned however short the time is.

    Args:
        problem: what is asked.
        budget_s: after so many seconds the best so far is returned; Ctrl-C does the same at once.
        top: how many plans, the best first; those after it differ from it in groups or modes.
        seed: of the order in which small changes are tried.
        on_progress: is told every now and then how far it is.
        all_devices: keeps devices that make a step less than a hundredth shorter and cost more money, which
            are left out otherwise.
        workers: processes, this one included, of which all but one are forked for the search (none where
            torch is loaded); the answer is the same with any number, unless the budget ends the search.

    Raises:
        ConfigError: The problem contradicts itself.
        NothingFitsError: No plan fits, or none keeps the constraints; says the smallest change that would.
        ProfileError: Nothing is known of the speed of any device.
        ClusterError: Nothing says how devices are connected.
    """
    problem.check()
    found = _Search(problem, budget_s, seed, on_progress, keeps_all=all_devices, workers=workers)
    with closing(found):
        return found.run(top)


class _Search:
    def __init__(
        self,
        problem: PlanProblem,
        budget_s: float,
        seed: int,
        on_progress: OnProgress | None,
        *,
        keeps_all: bool = False,
        workers: int = 1,
    ) -> None:
        self._keeps_all = keeps_all
        self._on_progress = on_progress
        self._budget = budget = SearchBudget(budget_s, self._tell)
        self._notes: list[str] = []
        self._unused: list[str] = []
        """What is said of devices that the best plan goes without."""
        self._clock = LayerTimeModel(problem.profile, problem.workload)
        problem, left_out = leave_out_unknown(problem, self._clock)
        self._notes += left_out
        self._problem = problem
        self._table = table = LayerTable(problem.workload, self._clock, problem.replicas.exchange_s)
        step_time = StepTimeEstimate(problem, table)
        self._memory = RankMemory(problem, table, self._clock.kept_bytes)
        builder = CandidateBuilder(problem, table, step_time, self._memory)
        self._bounds = DeviceBounds(problem, self._clock)
        self._evaluator = CandidateEvaluator(
            problem, builder, step_time, self._bounds.price_per_hour, budget.check
        )
        self._top_k = TopK(problem, table, budget, workers - 1)
        self._seed = seed
        self._begin()

    def close(self) -> None:
        """Ends what was started."""
        self._top_k.close()

    def _begin(self) -> None:
        """Nothing was looked at yet."""
        problem, evaluator, budget = self._problem, self._evaluator, self._budget
        self._found = FoundCandidates(evaluator.node_kinds)
        self._looks = CoarseLooks(problem, evaluator, self._bounds, self._found, budget)
        self._refinements = Refinements(problem, evaluator, self._looks, self._found)
        self._estimates = BestEstimates(self._found, self._top_k, budget, evaluator)
        starts = self._estimates.simulated
        self._local_search = LocalSearch(
            problem, self._table, evaluator, self._top_k, budget, starts, self._seed
        )

    def _progress(self) -> Progress:
        best = self._top_k.best
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
            self._evaluator.forget()
            self._top_k.forget()
            self._budget.may_stop = self._budget.has_found = False
            self._begin()
            ending = self._look()
            plans = self._choose(top)
        if not plans:
            self._memory.scale = 1.0
            raise NothingFitsError(self._explain_nothing(is_certain=ending != "budget"))
        assert self._top_k.best is not None
        candidate = self._top_k.best.estimated.candidate
        used = {device for group in candidate.groups for device in group.devices}
        seen = (own.devices for own in self._looks.looks if own.num_looked)
        apart = [*islice((own.note for own in seen if own.note and used <= {*own.devices}), 1)]
        self._notes += apart or self._unused
        if plans[0].is_first_step:
            self._notes.append(ONE_STEP)
        self._tell()
        return PlanAnswer(
            plans=plans,
            progress=self._progress(),
            ending=ending,
            notes=tuple(dict.fromkeys(self._notes)),
            improvements=tuple(self._top_k.improvements),
            unseen=() if ending == "finished" else tuple(self._list_unseen()),
        )

    def _look(self) -> Ending:
        """Finds candidates, simulates the best and improves them, side by side."""
        self._looks.begin(propose_devices(self._problem, bounds=self._bounds))
        works = (
            (self._looks, COARSE_SHARE),
            (self._refinements, REFINING_SHARE),
            (self._estimates, SIMULATING_SHARE),
            (self._local_search, IMPROVING_SHARE),
        )
        ending: Ending = "finished"
        self._budget.may_end = True
        try:
            turns = Turns(works)
            turns.run()
            while self._local_search.begin_another():
                turns.run()
        except BudgetOverError:
            ending = "budget"
        except KeyboardInterrupt:
            if not len(self._found):
                raise
            ending = "interrupted"
        self._budget.may_end = False
        if self._top_k.best is None:  # There may have been no time to come to what needs least memory.
            estimated = self._found.best or self._find_any(self._budget.worked_s + FUTILE_S)
            if estimated is None or self._top_k.simulate(estimated) is None:
                raise NothingFitsError(self._explain_nothing(is_certain=ending != "budget"))
        return ending

    def _list_unseen(self) -> Iterator[str]:
        """What there was no time for."""
        looks = self._looks.looks
        unseen = sum(not own.num_looked for own in looks)
        if unseen:
            yield f"{unseen} of {count(len(looks), 'set')} of devices"
        begun = sum(own.num_looked > 0 and not own.is_over for own in looks)
        if begun:
            yield f"some groupings of {count(begun, 'other set' if unseen else 'set')}"
        if self._refinements.num_waiting:
            yield f"{count(self._refinements.num_waiting, 'first estimate')} more closely"

    # -- the answer ------------------------------------------------------------------------

    def _choose(self, top: int) -> tuple[Planned, ...]:
        """The best that fit, each with other groups or modes than those before."""
        chosen: list[Planned] = []
        structures = Structures(self._problem)
        seen: set[Structure] = set()
        refused: SimulatedCandidate | None = None
        num_repeated = 0
        simulated = self._top_k.sort()
        allowed = [found for found in simulated if found.score.is_allowed]
        if allowed and self._leaves_out:
            first = choose_paying(allowed)
            simulated = [first, *(found for found in simulated if found is not first)]
        for found in simulated:
            structure = structures.describe(found.estimated.candidate, found.iteration_s)
            if structure & seen:
                continue
            if not self._top_k.is_kept(found):
                num_repeated += 1
                if num_repeated > MOST_REPEATED:
                    continue
            if not self._top_k.fits(found):
                continue
            case = self._top_k.find_case(found)
            if not found.score.is_allowed:
                refused = refused or found
                continue
            if not chosen:
                self._unused = describe_unused(self._problem, found, allowed)
            seen |= structure
            chosen.append(self._finish(found, case))
            if len(chosen) == max(1, top):
                break
        if not chosen and refused is not None:
            raise NothingFitsError(self._explain_refused(refused))
        return tuple(chosen)

    @property
    def _leaves_out(self) -> bool:
        """Whether devices that do not pay are left out."""
        problem = self._problem
        return problem.objective == "throughput" and problem.fixed.groups is None and not self._keeps_all

    def _explain_refused(self, found: SimulatedCandidate) -> str:
        """Where plans fit, and none keeps what is asked for."""
        problem = self._problem
        asked = []
        if isfinite(problem.max_cost_per_iteration):
            asked.append(
                f"at most {problem.max_cost_per_iteration:g} {problem.cluster.currency} an iteration"
            )
        if problem.min_throughput:
            asked.append(f"at least {problem.describe_speed(problem.min_throughput)}")
        return (
            f"plan: none of the {self._budget.num_simulated} plans that were simulated keeps "
            f"{' and '.join(asked)}; the nearest costs {found.cost:.4g} {problem.cluster.currency} an "
            f"iteration and makes {problem.describe_speed(1 / found.iteration_s)}; "
            "ease what is asked for, or search longer"
        )

    def _finish(self, found: SimulatedCandidate, case: SimulatedPlan) -> Planned:
        simulation = case.simulation
        devices = [device for group in found.estimated.candidate.groups for device in group.devices]
        # Of any plan of theirs, whatever settings are fixed.
        ideal_s = DeviceBounds(replace(self._problem, fixed=Fixed()), self._clock).bound_s(devices)
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
            for degree in self._evaluator.list_first_degrees(groups):
                search = CoarseSearch(self._evaluator, groups, name, degree=degree)
                found = search.find_any(in_flight=bool(self._problem.fixed.bounds_in_flight))
                if found is not None:
                    return found
        return None

    @cached_property
    def _likely_groups(self) -> list[tuple[Groups, str]]:
        sets = propose_devices(self._problem, bounds=self._bounds)[:FEW_SETS]
        return [own for devices in sets for own in islice(self._looks.list_groups(devices), FEW_GROUPINGS)]

    def _explain_nothing(self, *, is_certain: bool) -> str:
        end_s = self._budget.worked_s + max(FUTILE_S, 2 * self._budget.budget_s)
        return describe_nothing(
            self._problem,
            self._memory,
            lambda: self._find_any(end_s),
            lambda found: self._top_k.walk(found.candidate),
            lambda: self._budget.worked_s > end_s,
            is_certain=is_certain,
        )
