"""`zorselike plan --html`: the best plan as a page, with how the search came to it."""

from __future__ import annotations

from collections.abc import Sequence

from zorselike.planner.answer import PlanAnswer, Progress
from zorselike.planner.problem import PlanProblem
from zorselike.simulator.html.document import check_bokeh, save_page
from zorselike.simulator.html.found import FoundPlan, Search
from zorselike.simulator.simulated_plan import Baseline


class PlanPage:
    """A page to be written when the search is over, which it follows.

    Raises `ConfigError` at once if what draws the page is not installed.
    """

    def __init__(self, path: str) -> None:
        check_bokeh()
        self.path = path
        self._found: list[FoundPlan] = []

    def follow(self, progress: Progress) -> None:
        """Remembers each better plan."""
        if progress.best_s is not None and (
            not self._found or self._found[-1].iteration_s != progress.best_s
        ):
            self._found.append(FoundPlan(progress.elapsed_s, progress.best_s, progress.num_simulated))

    def write(
        self,
        problem: PlanProblem,
        answer: PlanAnswer,
        baselines: Sequence[Baseline] | None,
        *,
        notes: Sequence[str],
    ) -> None:
        """Writes it; without `baselines` with the fastest devices alone and even shares."""
        from zorselike.cost.layer_times import LayerTimeModel
        from zorselike.planner.baselines.even import compare_even
        from zorselike.simulator.report.speeds import measure_speeds

        best, setting, progress = answer.best, problem.setting, answer.progress
        case = setting.simulate(best.case.plan, best.case.costs, record=True)
        clock = LayerTimeModel(problem.profile, problem.workload)
        speeds = measure_speeds(case.plan, problem.workload, problem.cluster, clock)
        if not self._found or self._found[-1].iteration_s != case.simulation.iteration_s:
            last = FoundPlan(progress.elapsed_s, case.simulation.iteration_s, progress.num_simulated)
            self._found.append(last)
        save_page(
            case,
            self.path,
            baselines=compare_even(case, setting, speeds) if baselines is None else baselines,
            speeds=speeds,
            ideal_s=best.ideal_s,
            notes=notes,
            search=Search(found=self._found, end_s=progress.elapsed_s, bound_s=progress.bound_s),
        )
