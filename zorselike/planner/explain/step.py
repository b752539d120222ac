"""A planned step as a page: against what it is fast, where time and memory go, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.planner.answer import Planned
from zorselike.planner.baselines.even import compare_even
from zorselike.planner.problem import PlanProblem
from zorselike.simulator.report.ideal import measure_speeds
from zorselike.simulator.report.page import format_report
from zorselike.simulator.simulated_plan import SimulatedPlan

_PARTS: Mapping[str, str] = {
    "busy_s": "computing",
    "waiting_for_data_s": "bubble (waiting for other groups' rows)",
    "exposed_communication_s": "communication that nothing hides",
    "exposed_copies_s": "copies that nothing hides",
}


def describe_page(planned: Planned, problem: PlanProblem, *, width: int) -> str:
    """`zorselike simulate`'s page of the plan, and the shares of all devices' time."""
    setting = problem.setting
    case = setting.simulate(planned.case.plan, planned.case.costs, record=True)
    clock = LayerTimeModel(problem.profile, problem.workload)
    speeds = measure_speeds(case.plan, problem.workload, problem.cluster, clock)
    page = format_report(case, compare_even(case, setting, speeds), ideal_s=planned.ideal_s, width=width)
    return f"{page}\n\n{describe_time(case)}"


def describe_time(case: SimulatedPlan) -> str:
    """`All devices' time: computing 82%, bubble ... 9%, ...`."""
    whole_s = case.simulation.iteration_s * len(case.simulation.ranks)
    shares = {
        what: sum(getattr(times, attribute) for times in case.simulation.ranks) / whole_s
        for attribute, what in _PARTS.items()
    }
    return "All devices' time: " + ", ".join(f"{what} {share:.0%}" for what, share in shares.items()) + "."
