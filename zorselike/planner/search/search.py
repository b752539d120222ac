"""The search for the best plan (DESIGN section 9).

Sets of devices, their groupings and the orders of groups are looked at in the order of what they promise;
for each, rows, layers, modes, rounds and ministages are decided by an estimate of the step
(`planner/estimate/step_time.py`) and the memory walk. The most promising sketches are simulated, and the
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
from zorselike.planner.answer import (
    Ending,
    NothingFitsError,
    OnProgress,
    PlanAnswer,
    Planned,
    Progress,
)
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.structure import Structure, Structures
from zorselike.planner.devices.bounds import DeviceBounds
from zorselike.planner.devices.choose import propose_devices
from zorselike.planner.estimate.memory import RankMemory
from zorselike.planner.estimate.step_time import Pace
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.budget import FUTILE_S, Effort
from zorselike.planner.search.compose import Composer
from zorselike.planner.search.explore import Candidate, Explorer, Groups
from zorselike.planner.search.local_search import Climber
from zorselike.planner.search.nothing_fits import describe_nothing
from zorselike.planner.search.survey import Survey
from zorselike.planner.search.top_k import Finalist, Finalists
from zorselike.simulator.garbage import without_collection
from zorselike.simulator.report.limits import describe_limit
from zorselike.simulator.simulated_plan import SimulatedPlan

TIGHTER = 0.9
"""Of the memory there is, with what is planned where whole plans turn out not to fit."""
FEW_SETS, FEW_GROUPINGS = 2, 2
"""Of devices, and of each: in which something that fits is looked for, were there more memory."""
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
        self._effort = effort = Effort(budget_s, self._tell)
        self._notes: list[str] = []
        self._clock = LayerTimeModel(problem.profile, problem.workload)
        self._problem = problem = self._leave_out_unknown(problem)
        table = LayerTable(problem.workload, self._clock)
        pace = Pace(problem, table)
        self._memory = RankMemory(problem, table, self._clock.kept_bytes)
        composer = Composer(problem, table, pace, self._memory)
        self._bounds = DeviceBounds(problem, self._clock)
        self._explorer = Explorer(
            problem, table, composer, pace, self._bounds.price_per_hour, effort.is_exploring_over
        )
        self._survey = Survey(problem, self._explorer, self._bounds, effort)
        self._finalists = Finalists(problem, table, effort)
        self._climber = Climber(problem, self._explorer, composer, self._finalists, effort, seed)

    def _leave_out_unknown(self, problem: PlanProblem) -> PlanProblem:
        """Without devices of which nothing says how fast they are, such as those without this dtype."""
        cluster = problem.cluster
        unknown: dict[str, ProfileError] = {}
        for device in dict.fromkeys(cluster.device_type(cluster.places[d]) for d in problem.usable):
            try:
                for kind in problem.workload.kinds:
                    self._clock.forward_s(kind, device, 1, "none")
            except ProfileError as error:
                unknown[device] = error
        if not unknown:
            return problem
        known = tuple(d for d in problem.usable if cluster.device_type(cluster.places[d]) not in unknown)
        given = {d for group in problem.fixed.groups or () for d in group}
        if not known or given - {*known}:
            raise next(iter(unknown.values()))
        self._notes += [f"{device} left out: {error}" for device, error in unknown.items()]
        return replace(problem, devices=known)

    def _progress(self) -> Progress:
        best = None if self._finalists.best is None else self._finalists.best.case.simulation
        return Progress(
            elapsed_s=self._effort.elapsed_s,
            num_estimated=self._explorer.num_estimated,
            num_simulated=self._effort.num_simulated,
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
            self._forget()
            ending = self._look()
            plans = self._choose(top)
        if not plans:
            self._memory.scale = 1.0
            raise NothingFitsError(self._explain_nothing())
        assert self._finalists.best is not None
        sketch = self._finalists.best.candidate.sketch
        used = {device for group in sketch.groups for device in group.devices}
        seen = (own.note for own in self._survey.sets_seen if own.note and used <= {*own.devices})
        self._notes += islice(seen, 1)
        if self._finalists.best.is_first_step:
            self._notes.append(ONE_STEP)
        self._tell()
        return PlanAnswer(
            plans=plans, progress=self._progress(), ending=ending, notes=tuple(dict.fromkeys(self._notes))
        )

    def _look(self) -> Ending:
        """Finds candidates, simulates the best and improves them."""
        ending: Ending = "finished"
        try:
            self._survey.explore()
            self._simulate_best()
            self._climber.improve()
        except KeyboardInterrupt:
            if not self._survey.found:
                raise
            ending = "interrupted"
            self._effort.budget_s = 0.0
            self._simulate_best()
        if ending == "finished" and self._effort.is_cut:
            ending = "budget"
        return ending

    def _simulate_best(self) -> None:
        self._finalists.simulate_best(list(self._survey.found.values()))
        if self._finalists.best is None:  # There may have been no time to come to what needs least memory.
            frugal = self._find_any(self._effort.worked_s + FUTILE_S)
            self._finalists.simulate_best([] if frugal is None else [frugal])
        if self._finalists.best is None:
            raise NothingFitsError(self._explain_nothing())

    def _forget(self) -> None:
        """All that was found with more memory."""
        self._explorer.forget()
        self._survey.forget()
        self._finalists.forget()

    # -- the answer ------------------------------------------------------------------------

    def _choose(self, top: int) -> tuple[Planned, ...]:
        """The best that fit, each with other groups or modes than those before."""
        chosen: list[Planned] = []
        structures = Structures(self._problem.cluster)
        seen: set[Structure] = set()
        assert self._finalists.best is not None
        refused: Finalist | None = None
        first_rank = self._finalists.best.rank
        simulated = self._finalists.sort()
        for found in [self._finalists.best, *simulated]:
            own = structures.describe(found.candidate.sketch, found.case.simulation.iteration_s)
            if own & seen or not self._fits(found.case):
                continue
            if chosen and found.rank < first_rank:
                continue  # Hardly better than the first, and less simple.
            if not found.rank.is_allowed:
                refused = refused or found
                continue
            seen |= own
            first_rank = first_rank if chosen else found.rank
            chosen.append(self._finish(found))
            if len(chosen) == max(1, top):
                break
        if not chosen and refused is not None:
            raise NothingFitsError(self._explain_refused(refused))
        return tuple(chosen)

    def _explain_refused(self, found: Finalist) -> str:
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
            f"plan: none of the {self._effort.num_simulated} plans that were simulated keeps "
            f"{' and '.join(asked)}; the nearest costs {simulation.cost:.4g} {problem.cluster.currency} an "
            f"iteration and makes "
            f"{1 / simulation.iteration_s:.4g} iterations/s; ease what is asked for, or search longer"
        )

    def _fits(self, case: SimulatedPlan) -> bool:
        """By the walk over every rank's own list."""
        ranks = range(case.plan.num_ranks)
        return not any(map(case.is_overfull, ranks)) and not any(map(case.is_host_overfull, case.host_bytes))

    def _finish(self, found: Finalist) -> Planned:
        case, simulation = found.case, found.case.simulation
        devices = [device for group in found.candidate.sketch.groups for device in group.devices]
        ideal_s = self._bounds.bound_s(devices)
        share = ideal_s / simulation.iteration_s
        estimates = Estimates(
            iteration_s=simulation.iteration_s,
            cost_per_iteration=simulation.cost if simulation.cost else None,
            peak_memory_bytes=case.peak_bytes,
            share_of_ideal=share,
            limited_by=tuple(describe_limit(case)) if share < LIMITING_SHARE else (),
        )
        plan = replace(case.plan, estimates=estimates)
        return Planned(replace(case, plan=plan), found.candidate.grouping, ideal_s, found.is_first_step)

    def _find_any(self, end_s: float) -> Candidate | None:
        """Whatever fits first in a few likely groupings."""
        self._explorer.forget()
        for groups, name in self._likely_groups:
            if self._effort.worked_s > end_s:
                break
            if (found := self._explorer.find_any(groups, name)) is not None:
                return found
        return None

    @cached_property
    def _likely_groups(self) -> list[tuple[Groups, str]]:
        sets = propose_devices(self._problem, bounds=self._bounds)[:FEW_SETS]
        return [own for devices in sets for own in islice(self._survey.list_groups(devices), FEW_GROUPINGS)]

    def _explain_nothing(self) -> str:
        end_s = self._effort.worked_s + max(FUTILE_S, 2 * self._effort.budget_s)
        return describe_nothing(
            self._problem,
            self._memory,
            lambda: self._find_any(end_s),
            lambda: self._effort.worked_s > end_s,
        )
