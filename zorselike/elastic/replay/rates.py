"""How fast a job goes with the devices that are there: plans found once for each set of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from zorselike.elastic.deciding.same_groups import without_ranks
from zorselike.errors import ClusterError, PlanError, ProfileError
from zorselike.plan.plan import Plan
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.search import search_plans
from zorselike.simulator.simulated_plan import SimulatedPlan

Devices = tuple[int, ...]


@dataclass(frozen=True)
class Running:
    """A plan, simulated."""

    plan: Plan
    devices: Devices
    """Of each of its ranks: indices into `Cluster.places`."""
    step_s: float

    @property
    def rows_per_s(self) -> float:
        return self.plan.global_batch / self.step_s


@dataclass(frozen=True)
class Rates:
    """Answers of the planner, remembered."""

    problem: PlanProblem
    budget_s: float
    workers: int = 1
    on_search: Callable[[int], object] = lambda _: None
    """Is told before each search among how many devices it is."""
    _best: dict[tuple[Devices, int], Running | None] = field(default_factory=dict, init=False, repr=False)

    def find_best(self, devices: Devices, global_batch: int | None = None) -> Running | None:
        """The best plan found for some devices; None where nothing fits."""
        rows = self.problem.global_batch if global_batch is None else global_batch
        if (devices, rows) not in self._best:
            self._best[devices, rows] = self._search(devices, rows)
        return self._best[devices, rows]

    def _search(self, devices: Devices, rows: int) -> Running | None:
        if not devices:
            return None
        self.on_search(len(devices))
        problem = replace(self.problem, devices=devices, global_batch=rows)
        try:
            answer = search_plans(problem, budget_s=self.budget_s, top=1, workers=self.workers)
        except PlanError:
            return None
        return self._describe(answer.best.case)

    def keep_groups(self, running: Running, gone: Devices) -> Running | None:
        """The plan in which those of the same group take over what is gone; None where that does not fit."""
        lost = {rank for rank, device in enumerate(running.devices) if device in gone}
        try:
            kept = without_ranks(running.plan, lost)
            case = self.problem.setting.simulate(kept.plan)
        except (PlanError, ClusterError, ProfileError):
            return None
        fits = not any(case.is_overfull(rank) for rank in range(kept.plan.num_ranks))
        return self._describe(case) if fits and not any(map(case.is_host_overfull, case.host_bytes)) else None

    def _describe(self, case: SimulatedPlan) -> Running:
        index_of = {place: i for i, place in enumerate(self.problem.cluster.places)}
        places = self.problem.cluster.place_ranks(case.plan)
        return Running(case.plan, tuple(index_of[place] for place in places), case.simulation.iteration_s)
