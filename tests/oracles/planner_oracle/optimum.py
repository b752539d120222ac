"""The best of all plans of a small problem, by the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.sizes import is_layer
from zorselike.errors import ClusterError
from zorselike.plan.plan import Recompute
from zorselike.planner.problem import PlanProblem
from zorselike.simulator.simulated_plan import SimulatedPlan

from .every_plan import Options, Shape, list_shapes, make_plan


@dataclass(frozen=True)
class Optimum:
    """What trying all plans comes to."""

    case: SimulatedPlan | None = field(repr=False)
    """The best plan that fits; None where none does."""
    num_plans: int
    num_simulated: int
    """All but those of which a device computes for longer than the best one's step takes."""


def find_optimum(problem: PlanProblem, options: Options, *, prunes: bool = True) -> Optimum:
    """Simulates every plan with these options, those with the least to compute on the busiest device first.

    Microbatches are of one size in all of a plan, each size up to the options'; the last of a rank may be
    smaller.

    Args:
        prunes: False: also those that cannot be the fastest, since one device computes for too long.
    """
    shapes = list(list_shapes(problem))
    ranked = sorted(
        (bound_s, n, rows, shape)
        for rows in list_sizes(problem, options)
        for n, (bound_s, shape) in enumerate(
            _rank(problem, replace(options, rows_per_microbatch=rows), shapes)
        )
    )
    by_cost = problem.objective == "cost"
    best: SimulatedPlan | None = None
    best_score = float("inf")
    num_simulated = 0
    for bound_s, _, rows, shape in ranked:
        if prunes and not by_cost and bound_s >= best_score:
            break
        try:
            plan = make_plan(problem, shape, replace(options, rows_per_microbatch=rows))
            case = problem.setting.simulate(plan)
        except ClusterError:
            continue  # Groups that nothing joins.
        num_simulated += 1
        score = case.simulation.cost if by_cost else case.simulation.iteration_s
        if score < best_score and meets(problem, case):
            best, best_score = case, score
    return Optimum(best, len(ranked), num_simulated)


def list_sizes(problem: PlanProblem, options: Options) -> range:
    """Microbatch sizes that are tried."""
    return range(1, min(options.rows_per_microbatch, problem.global_batch) + 1)


def _rank(problem: PlanProblem, options: Options, shapes: Sequence[Shape]) -> Iterator[tuple[float, Shape]]:
    bounds = _Bounds(problem, options)
    return ((bounds.bound_s(shape), shape) for shape in shapes)


def meets(problem: PlanProblem, case: SimulatedPlan) -> bool:
    """Whether a plan fits, and keeps within the money and the time that are asked for."""
    simulation = case.simulation
    return (
        simulation.cost <= problem.max_cost_per_iteration
        and 1 / simulation.iteration_s >= problem.min_throughput
        and fits(case)
    )


def fits(case: SimulatedPlan) -> bool:
    """Whether every device and host has the memory."""
    ranks = range(case.plan.num_ranks)
    return not any(case.is_overfull(rank) for rank in ranks) and not any(
        case.is_host_overfull(node) for node in {place.node for place in case.costs.places}
    )


class _Bounds:
    """Seconds that no schedule of a shape can be faster than: those of its busiest device."""

    def __init__(self, problem: PlanProblem, options: Options) -> None:
        clock = LayerTimeModel(problem.profile, problem.workload)
        self._types = [problem.cluster.device_type(place) for place in problem.cluster.places]
        self._most = options.rows_per_microbatch
        # By device type and rows at once: seconds of each layer.
        self._seconds: dict[tuple[str, int], list[float]] = {}
        for device in set(self._types):
            for rows in range(1, options.rows_per_microbatch + 1):
                self._seconds[device, rows] = [
                    _time_layer(clock, kind, device, rows, options.recompute if is_layer(name) else "none")
                    for name, kind in problem.workload.layers
                ]

    def bound_s(self, shape: Shape) -> float:
        layers_of: list[list[int]] = [[] for _ in shape.groups]
        start = 0
        for i, size in enumerate(shape.sizes):
            layers_of[i % len(shape.groups)] += range(start, start + size)
            start += size
        return max(
            self._time_device(device, rows, layers)
            for devices, own, layers in zip(shape.groups, shape.rows, layers_of, strict=True)
            for device, rows in zip(devices, own, strict=True)
        )

    def _time_device(self, device: int, rows: int, layers: Sequence[int]) -> float:
        whole, rest = divmod(rows, self._most)
        total = 0.0
        for number, at_once in ((whole, self._most), (1, rest)):
            if number and at_once:
                seconds = self._seconds[self._types[device], at_once]
                total += number * sum(seconds[layer] for layer in layers)
        return total


def _time_layer(clock: LayerTimeModel, kind: str, device: str, rows: int, recompute: Recompute) -> float:
    forward_s = clock.forward_s(kind, device, rows, recompute)
    return forward_s + clock.backward_s(kind, device, rows, recompute)
