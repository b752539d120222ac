"""What other systems would make of fewer devices: the same freedom to leave some out as our plans have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from zorselike.errors import ClusterError, ConfigError, PlanError, ProfileError
from zorselike.planner.baselines.systems import plan_baselines
from zorselike.planner.devices.choose import propose_devices
from zorselike.planner.problem import PlanProblem
from zorselike.simulator.simulated_plan import Baseline, SimulatedPlan
from zorselike.text.wording import list_few

NAME = "best of those on any subset"
MOST_SUBSETS = 8
"""Sets of devices that are tried beside the whole, the most promising first of those that a person would
name."""


def plan_best_on_subsets(
    problem: PlanProblem,
    baselines: Sequence[Baseline],
    used: Sequence[int] = (),
    tell: Callable[[str], None] = lambda name: None,
) -> Baseline:
    """The best baseline, by what is asked for, with all devices that may be used, with those of a type, a
    region, a zone or a kind of nodes or all but those, and with those that our own plan uses.

    Args:
        baselines: of all devices.
        used: devices of our plan.
        tell: as of `plan_baselines`, with the devices.
    """
    found = [(baseline, "all devices") for baseline in baselines]
    for devices in _list_subsets(problem, tuple(sorted(used))):
        counts = Counter(problem.device_types[device] for device in devices)
        whose = list_few([f"{number} {device}" for device, number in counts.items()])
        try:
            planned = plan_baselines(replace(problem, devices=devices), partial(_tell, tell, whose))
            found += [(own, whose) for own in planned]
        except (ClusterError, ConfigError, PlanError, ProfileError):
            continue
    fitting = [(own.simulated, own, whose) for own, whose in found if own.simulated is not None]
    if not fitting:
        return Baseline(name=NAME, how="", simulated=None, reason="nothing fits on any of them")
    case, best, whose = min(fitting, key=lambda each: _measure(problem, each[0]))
    return Baseline(name=NAME, how=f"{best.name} on {whose}: {best.how}", simulated=case)


def _tell(tell: Callable[[str], None], whose: str, name: str) -> None:
    tell(f"{name} on {whose}")


def _list_subsets(problem: PlanProblem, used: tuple[int, ...]) -> list[tuple[int, ...]]:
    asked = replace(problem, max_cost_per_iteration=float("inf"), min_throughput=0.0)
    named = [chosen.devices for chosen in propose_devices(asked) if chosen.is_share]
    subsets = dict.fromkeys((*((used,) if used else ()), *named))
    return [devices for devices in subsets if devices != problem.usable][:MOST_SUBSETS]


def _measure(problem: PlanProblem, case: SimulatedPlan) -> float:
    return case.simulation.cost if problem.objective == "cost" else case.simulation.iteration_s
