"""What a plan is compared with: the same step as one data-parallel group, as common frameworks do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from zorselike.cost.memory import walk_memory
from zorselike.cost.step_costs import StepCosts
from zorselike.errors import ProfileError
from zorselike.plan.cluster.cluster import Cluster, Place
from zorselike.plan.plan import RECOMPUTE, Group, Microbatch, Plan, Recompute
from zorselike.plan.workload import Workload
from zorselike.planner.candidate.to_plan import assemble_plan
from zorselike.schedule.actions import Action
from zorselike.schedule.contract import SENDS_KEPT_BY_NCCL
from zorselike.simulator.inputs import SimulationInputs
from zorselike.simulator.simulated_plan import Baseline, SimulatedPlan
from zorselike.text.wording import count, show_bytes

ORDER = "1f1b"
"""Of a single stage: each microbatch forward and at once backward, so that one's activations are kept."""
_STAGES = (0, 1, 2, 3)


def compare_even(
    simulated: SimulatedPlan, inputs: SimulationInputs, speeds: Sequence[float]
) -> tuple[Baseline, ...]:
    """The same step on the plan's fastest devices alone, and on all of them, every rank with as many rows.

    Args:
        simulated: the plan in question.
        inputs: with what it was simulated.
        speeds: rows per second of each rank by itself (`simulator/report/speeds.py`), to know the fastest
        type.
    """
    places = simulated.costs.places
    best = simulated.device_types[max(range(len(places)), key=lambda rank: speeds[rank])]
    fast = [place for place, device in zip(places, simulated.device_types, strict=True) if device == best]
    even = find_even("even shares", inputs, places, simulated.plan.global_batch)
    if len(fast) == len(places):
        return (even,)
    return find_even(f"{len(fast)} x {best} alone", inputs, fast, simulated.plan.global_batch), even


def find_even(
    name: str,
    inputs: SimulationInputs,
    places: Sequence[Place],
    global_batch: int,
    *,
    recompute: Sequence[Recompute] = RECOMPUTE,
) -> Baseline:
    """Every device with as many rows, to within one; with fewer rows than devices as many as have one."""
    used = places[:global_batch]
    each, more = divmod(global_batch, len(used))
    rows = [each + (rank < more) for rank in range(len(used))]
    return find_data_parallel(name, inputs, used, rows, recompute=recompute)


def find_data_parallel(
    name: str,
    inputs: SimulationInputs,
    places: Sequence[Place],
    rows: Sequence[int],
    *,
    recompute: Sequence[Recompute] = RECOMPUTE,
) -> Baseline:
    """One data-parallel group with one ministage, in the ZeRO stage that is fastest of those that fit, with
    the largest microbatches that fit.

    Args:
        rows: of each device in a step.
        recompute: in order; the next is looked at only where nothing fits.
    """
    reason = ""
    for choice in recompute:
        fitting: list[SimulatedPlan] = []
        for zero in _STAGES:
            fit = _find_largest(inputs, places, rows, zero, choice)
            if isinstance(fit, _Fit):
                fitting.append(inputs.simulate(fit.plan, fit.costs, schedule=ORDER))
            else:
                reason = fit
        if fitting:
            best = min(fitting, key=lambda simulated: simulated.simulation.iteration_s)
            return Baseline(name=name, how=_describe(best.plan), simulated=best)
    return Baseline(name=name, how="", simulated=None, reason=reason)


class _Fit(NamedTuple):
    """A plan that fits."""

    plan: Plan
    costs: StepCosts


def _find_largest(
    inputs: SimulationInputs, places: Sequence[Place], rows: Sequence[int], zero: int, recompute: Recompute
) -> _Fit | str:
    """The plan with the largest microbatches that fit: a power of two, or all of the busiest rank's rows; or
    why not even one row does."""
    most = max(rows)
    sizes = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
    found: _Fit | None = None
    reason = ""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        candidate = make_data_parallel_plan(
            inputs.workload,
            inputs.cluster,
            places,
            rows,
            zero=zero,
            recompute=recompute,
            num_microbatches=-(-most // sizes[middle]),
        )
        try:
            costs = inputs.find_costs(candidate)
            misfit = find_misfit(candidate, costs, inputs.list_actions(candidate, ORDER))
            reason = "" if misfit is None else misfit.explain(candidate)
        except ProfileError as error:  # Such as more rows than were found to fit.
            reason = str(error)
        if reason:
            high = middle
        else:
            found, low = _Fit(candidate, costs), middle + 1
    return reason if found is None else found


def make_data_parallel_plan(
    workload: Workload,
    cluster: Cluster,
    places: Sequence[Place],
    rows: Sequence[int],
    *,
    zero: int,
    recompute: Recompute = "none",
    num_microbatches: int,
) -> Plan:
    """One group over `places` with one ministage; every rank goes through its rows in as many microbatches
    of equal size (to within one row), or in as many as it has rows."""
    microbatches: list[Microbatch] = []
    starts = [0, *accumulate(rows)]
    for rank, (start, mine) in enumerate(zip(starts, rows, strict=False)):
        number = min(mine, num_microbatches)
        cuts = [start + mine * m // number for m in range(number + 1)] if number else []
        microbatches += [Microbatch(rank, *cut) for cut in pairwise(cuts)]
    group = Group(
        ranks=tuple(range(len(places))), microbatches=tuple(microbatches), zero=zero, recompute=recompute
    )
    return assemble_plan(workload, cluster, places, [group], [len(workload.layers)])


@dataclass(frozen=True)
class Misfit:
    """A rank that needs more memory than its device has."""

    rank: int
    peak_bytes: int
    limit_bytes: int

    def explain(self, plan: Plan) -> str:
        device = plan.devices[self.rank]
        return (
            f"OUT OF MEMORY: {device.type} of node {device.node} would need {show_bytes(self.peak_bytes)} of "
            f"{show_bytes(self.limit_bytes)}"
        )


def find_misfit(plan: Plan, costs: StepCosts, actions: Mapping[int, Sequence[Action]]) -> Misfit | None:
    """The rank whose device lacks most memory; None if all fit.

    Ranks of one group with the same type of device, the same memory, the same rows and the same degree hold
    the same: one of them is walked.
    """
    peaks: dict[tuple[int, str, int, tuple[int, ...], int], int] = {}
    worst: Misfit | None = None
    for rank, limit_bytes in enumerate(costs.memory_bytes):
        rows = tuple(microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank))
        degree = plan.replica_of(rank).degree
        key = plan.group_of_rank[rank], plan.devices[rank].type, limit_bytes, rows, degree
        context_bytes = costs.context_bytes[rank] if costs.context_bytes else 0
        if key not in peaks:
            by_gloo = costs.is_cpu and costs.is_cpu[rank]
            walk = walk_memory(
                plan,
                rank,
                actions[rank],
                costs.sizes[rank],
                num_sends_kept=None if by_gloo else SENDS_KEPT_BY_NCCL,
                on_gpu=not by_gloo,
                communicator_bytes=costs.communicator_bytes,
            )
            peaks[key] = round(walk.device_peak_bytes * (1 + costs.allocator_share))
        lack = peaks[key] + context_bytes - limit_bytes
        if lack > (0 if worst is None else worst.peak_bytes - worst.limit_bytes):
            worst = Misfit(rank, peaks[key] + context_bytes, limit_bytes)
    return worst


def _describe(plan: Plan) -> str:
    """`8 ranks, ZeRO 2, 4 rows at once`."""
    (group,) = plan.groups
    num_rows = max(microbatch.num_rows for microbatch in group.microbatches)
    again = ", layers recomputed" if group.recompute == "layer" else ""
    return f"{count(plan.num_ranks, 'rank')}, ZeRO {group.zero}, {count(num_rows, 'row')} at once{again}"
