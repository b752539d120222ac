"""What others would do with the same devices, beside a plan."""

from __future__ import annotations

from collections.abc import Sequence

from zorselike.planner.answer import Planned
from zorselike.simulator.simulated_plan import Baseline, SimulatedPlan
from zorselike.text.layout import align_columns


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
