"""A planned step as a page: against what it is fast, where time and memory go, and what limits it; and beside
what others would do with the same devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.planner.answer import Planned
from zorselike.planner.baselines.even import compare_even
from zorselike.planner.problem import PlanProblem
from zorselike.simulator.report.page import format_report
from zorselike.simulator.report.speeds import measure_speeds
from zorselike.simulator.simulated_plan import Baseline, SimulatedPlan
from zorselike.text.layout import align_columns

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


def tabulate_baselines(best: Planned, baselines: Sequence[Baseline]) -> list[str]:
    """A line for each, the plan first: how fast, for how much, and how much faster the plan is."""
    cases = [best.case, *(baseline.simulated for baseline in baselines)]
    has_prices = any(case is not None and case.simulation.cost for case in cases)
    heading = [
        "",
        "s per step",
        "tokens/s",
        f"{best.case.costs.currency} per step" if has_prices else "",
        "",
        "",
    ]
    table = [heading, ["this plan", *_show(best.case, has_prices), "", ""]]
    for baseline in baselines:
        if baseline.simulated is None:
            table.append([baseline.name, "", "", "", "", baseline.reason])
            continue
        ratio = baseline.simulated.simulation.iteration_s / best.case.simulation.iteration_s
        table.append(
            [
                baseline.name,
                *_show(baseline.simulated, has_prices),
                f"plan {ratio:.2f} x as fast",
                baseline.how,
            ]
        )
    return align_columns(table, left=(0, 5))


def _show(case: SimulatedPlan, has_prices: bool) -> list[str]:
    money = f"{case.simulation.cost:.4g}" if has_prices else ""
    return [f"{case.simulation.iteration_s:.4g}", f"{case.tokens_per_s:,.0f}", money]
