"""What a plan is compared with: even shares, as data-parallel frameworks give them, on its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from zorselike.cost.memory import walk_memory
from zorselike.cost.step_costs import StepCosts
from zorselike.plan.cluster import Cluster, Place
from zorselike.plan.errors import ProfileError
from zorselike.plan.plan import Device, Group, Microbatch, Ministage, Plan, Recompute
from zorselike.plan.wording import count, show_bytes
from zorselike.simulator.case import Case, Schedule

if TYPE_CHECKING:
    from zorselike.simulator.setting import Setting

_STAGES = (0, 1, 2, 3)
_ORDER: Schedule = "1f1b"
"""Of a single stage: each microbatch forward and at once backward, so that activations of one are kept."""
_RECOMPUTE: tuple[Recompute, ...] = ("none", "layer")


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to use a plan's devices."""

    name: str
    how: str
    """Devices, ZeRO stage, microbatches."""
    case: Case | None
    """None where nothing fits."""
    reason: str = ""
    """Why nothing fits."""


def compare_even(case: Case, setting: Setting, speeds: Sequence[float]) -> tuple[Alternative, ...]:
    """The same step on the plan's fastest devices alone, and on all of them, every rank with as many rows.

    Each is one data-parallel group with one ministage, in the ZeRO stage that is fastest of those that
    fit, with the largest microbatch that fits; layers are recomputed where nothing fits else.

    Args:
        case: the plan in question.
        setting: with what it was simulated.
        speeds: rows per second of each rank by itself (`ideal.py`), to know the fastest type.
    """
    places = case.costs.places
    best = case.device_types[max(range(len(places)), key=lambda rank: speeds[rank])]
    fast = [place for place, device in zip(places, case.device_types, strict=True) if device == best]
    even = _find_even("even shares", case.plan, places, setting)
    if len(fast) == len(places):
        return (even,)
    return _find_even(f"{len(fast)} x {best} alone", case.plan, fast, setting), even


def _find_even(name: str, plan: Plan, places: Sequence[Place], setting: Setting) -> Alternative:
    reason = ""
    for recompute in _RECOMPUTE:
        fitting: list[Case] = []
        for zero in _STAGES:
            fit = _find_largest(plan, places, setting, zero, recompute)
            if isinstance(fit, _Fit):
                fitting.append(setting.simulate(fit.plan, fit.costs, schedule=_ORDER))
            else:
                reason = fit
        if fitting:
            best = min(fitting, key=lambda case: case.simulation.iteration_s)
            return Alternative(name=name, how=_describe(best.plan), case=best)
    return Alternative(name=name, how="", case=None, reason=reason)


class _Fit(NamedTuple):
    """A plan that fits."""

    plan: Plan
    costs: StepCosts


def _find_largest(
    plan: Plan, places: Sequence[Place], setting: Setting, zero: int, recompute: Recompute
) -> _Fit | str:
    """The even plan with the largest microbatches that fit: a power of two, or all of a rank's rows; or why
    not even one row does."""
    most = -(-plan.global_batch // len(places))
    sizes = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
    found: _Fit | None = None
    reason = ""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        candidate = make_even_plan(
            plan, places, setting.cluster, zero=zero, recompute=recompute, num_rows=sizes[middle]
        )
        try:
            costs = setting.find_costs(candidate)
            reason = _find_misfit(candidate, costs, setting)
        except ProfileError as error:  # Such as more rows than were found to fit.
            reason = str(error)
        if reason:
            high = middle
        else:
            found, low = _Fit(candidate, costs), middle + 1
    return reason if found is None else found


def make_even_plan(
    plan: Plan,
    places: Sequence[Place],
    cluster: Cluster,
    *,
    zero: int,
    recompute: Recompute = "none",
    num_rows: int,
) -> Plan:
    """The plan's model and global batch in one data-parallel group over `places`, every rank with the same
    rows (to within one) in as many microbatches, of `num_rows` at most (where rows do not divide, one more).

    With fewer rows than places only as many places are used."""
    used = places[: plan.global_batch]
    each, more = divmod(plan.global_batch, len(used))
    num_microbatches = min(each, -(-(each + (more > 0)) // num_rows))
    microbatches: list[Microbatch] = []
    for rank in range(len(used)):
        start = rank * each + min(rank, more)
        rows = each + (rank < more)
        cuts = [start + rows * m // num_microbatches for m in range(num_microbatches + 1)]
        microbatches += [Microbatch(rank, *cut) for cut in pairwise(cuts)]
    group = Group(
        ranks=tuple(range(len(used))), microbatches=tuple(microbatches), zero=zero, recompute=recompute
    )
    modules = tuple(module for ministage in plan.ministages for module in ministage.modules)
    devices = tuple(
        Device(rank, cluster.nodes[place.node].name, place.local_rank, cluster.device_type(place))
        for rank, place in enumerate(used)
    )
    return Plan(
        global_batch=plan.global_batch,
        groups=(group,),
        ministages=(Ministage(0, modules),),
        devices=devices,
        sequence_length=plan.sequence_length,
        model=plan.model,
    )


def _find_misfit(plan: Plan, costs: StepCosts, setting: Setting) -> str:
    """Of the ranks whose device is too small, the one that lacks most, in words; nothing if all fit."""
    actions = setting.list_actions(plan, _ORDER)
    peaks: dict[tuple[str, tuple[int, ...]], int] = {}
    """By type of device and rows of the microbatches: in an even plan ranks differ in nothing else."""
    lacks: dict[int, tuple[int, int]] = {}
    for rank, limit_bytes in enumerate(costs.memory_bytes):
        rows = tuple(microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank))
        key = plan.devices[rank].type, rows
        if key not in peaks:
            walk = walk_memory(plan, rank, actions[rank], costs.sizes[rank])
            peaks[key] = round(walk.device_peak_bytes * (1 + costs.allocator_share))
        peak_bytes = peaks[key] + (costs.context_bytes[rank] if costs.context_bytes else 0)
        if peak_bytes > limit_bytes:
            lacks[rank] = peak_bytes, limit_bytes
    if not lacks:
        return ""
    worst = max(lacks, key=lambda rank: lacks[rank][0] - lacks[rank][1])
    device, (peak, limit) = plan.devices[worst], lacks[worst]
    return (
        f"OUT OF MEMORY: {device.type} of node {device.node} would need {show_bytes(peak)} of "
        f"{show_bytes(limit)}"
    )


def _describe(plan: Plan) -> str:
    """`8 ranks, ZeRO 2, 4 rows at once`."""
    (group,) = plan.groups
    num_rows = max(microbatch.num_rows for microbatch in group.microbatches)
    again = ", layers recomputed" if group.recompute == "layer" else ""
    return f"{count(plan.num_ranks, 'rank')}, ZeRO {group.zero}, {count(num_rows, 'row')} at once{again}"
