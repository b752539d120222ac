"""Cephalo: one fully sharded group, uneven rows and uneven shards, layered gradient accumulation.

Guo et al. 2025 ("Cephalo: Harnessing Heterogeneous GPU Clusters for Training Transformer Models"), as Zorse
describes it (section 3): all microbatches go through a layer before the next, so that its parameters are
gathered, and its gradients reduced, once for all of them. On our costs that is ZeRO 3 with all of a rank's
rows at once, whose computation takes as long as its microbatches do one after the other and whose layers
need room for one microbatch while they compute. Rows go to cards by their measured times, the training state
where there is room for it, as evenly as that allows. Layers may be recomputed, and what is kept for the
backward offloaded (Zorse, section 7), which takes a pass as long as its copies at least. Collectives of
uneven shards take as long as those of even ones, which favours the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.memory import walk_memory
from zorselike.cost.sizes import MinistageBytes, is_layer
from zorselike.cost.step_costs import StepCosts
from zorselike.errors import PlanError, ProfileError
from zorselike.plan.cluster.cluster import Place
from zorselike.plan.plan import Group, Microbatch, Plan, Recompute
from zorselike.planner.baselines.even import ORDER, find_misfit
from zorselike.planner.candidate.candidate import Sizes
from zorselike.planner.candidate.to_plan import assemble_plan
from zorselike.planner.rows.share_rows import RankCosts, share_once
from zorselike.schedule.contract import COPIES_IN_FLIGHT
from zorselike.simulator.inputs import SimulationInputs
from zorselike.simulator.simulated_plan import Baseline, SimulatedPlan
from zorselike.text.wording import count

MOST_AT_ONCE = 32
"""Rows of a microbatch."""


def find_cephalo(
    name: str,
    inputs: SimulationInputs,
    places: Sequence[Place],
    global_batch: int,
    *,
    recompute: Sequence[Recompute],
) -> Baseline:
    """The fastest of recomputation and offloading or not, each with the largest microbatches that fit."""
    reason = ""
    fitting: list[tuple[SimulatedPlan, str]] = []
    for choice, offloads in product(recompute, (False, True)):
        job = _Job(inputs, tuple(places), global_batch, choice, offloads)
        found = job.find_largest()
        if isinstance(found, str):
            reason = found
        else:
            fitting.append((inputs.simulate(found.plan, found.costs, schedule=ORDER), job.describe(found)))
    if not fitting:
        return Baseline(name=name, how="", simulated=None, reason=reason)
    best, how = min(fitting, key=lambda pair: pair[0].simulation.iteration_s)
    return Baseline(name=name, how=how, simulated=best)


@dataclass(frozen=True)
class _Fit:
    """A plan that fits."""

    plan: Plan
    costs: StepCosts
    most: int
    """Rows of the largest microbatch."""


@dataclass(frozen=True)
class _Job:
    """What is to be done, and how."""

    inputs: SimulationInputs
    places: tuple[Place, ...]
    global_batch: int
    recompute: Recompute
    offloads: bool

    def find_largest(self) -> _Fit | str:
        """With the largest microbatches that fit, or why not even those of one row do."""
        reason = ""
        most = min(MOST_AT_ONCE, self.global_batch)
        while most:
            try:
                plan, costs = self._lay(most)
            except (PlanError, ProfileError) as error:
                return str(error)
            misfit = find_misfit(plan, costs, self.inputs.list_actions(plan, ORDER))
            if misfit is None:
                return _Fit(plan, costs, most)
            reason = misfit.explain(plan)
            most //= 2
        return reason

    def describe(self, fit: _Fit) -> str:
        """`64 ranks, up to 4 rows at once, layers recomputed, activations offloaded`."""
        again = ", layers recomputed" if self.recompute == "layer" else ""
        away = ", activations offloaded" if self.offloads else ""
        return f"{count(fit.plan.num_ranks, 'rank')}, up to {count(fit.most, 'row')} at once{again}{away}"

    def _lay(self, most: int) -> tuple[Plan, StepCosts]:
        """Rows by speed in microbatches of at most so many, and what that costs."""
        clock = LayerTimeModel(self.inputs.profile, self.inputs.workload)
        devices = [self.inputs.cluster.device_type(place) for place in self.places]
        times = {device: self._time_rows(clock, device, most) for device in dict.fromkeys(devices)}
        ranks = [RankCosts(rank, times[device]) for rank, device in enumerate(devices)]
        sizes = share_once(ranks, self.global_batch)
        plan = self._make_plan([sum(own) for own in sizes])
        # Whole rows of a rank are at once in no layer: what the profile found to fit is for microbatches.
        free = tuple(replace(own, max_rows=None) for own in self.inputs.profile.layers)
        profile = replace(self.inputs.profile, layers=free)
        costs = replace(self.inputs, profile=profile).find_costs(plan)
        forward_s: dict[tuple[int, int, int], float] = {}
        backward_s: dict[tuple[int, int, int], float] = {}
        for rank, (device, own) in enumerate(zip(devices, sizes, strict=True)):
            copy_s = self._copy_s(costs, rank, sum(own))
            passes = self._time_passes(clock, device, own)
            forward_s[rank, 0, sum(own)], backward_s[rank, 0, sum(own)] = (max(s, copy_s) for s in passes)
        costs = replace(
            costs,
            assumptions=clock.assumptions,
            sizes=self._size(costs, sizes),
            forward_s=forward_s,
            backward_s=backward_s,
        )
        return plan, spread_state(plan, self.inputs, costs)

    def _make_plan(self, rows: Sequence[int]) -> Plan:
        workload = self.inputs.workload
        cuts = pairwise(accumulate(rows, initial=0))
        group = Group(
            ranks=tuple(range(len(rows))),
            microbatches=tuple(Microbatch(rank, *cut) for rank, cut in enumerate(cuts) if cut[0] < cut[1]),
            zero=3,
            recompute=self.recompute,
        )
        return assemble_plan(workload, self.inputs.cluster, self.places, [group], [len(workload.layers)])

    # -- times -----------------------------------------------------------------------------

    @property
    def _layers(self) -> list[tuple[str, Recompute]]:
        return [
            (kind, self.recompute if is_layer(module) else "none")
            for module, kind in self.inputs.workload.layers
        ]

    def _time_rows(self, clock: LayerTimeModel, device: str, most: int) -> tuple[float, ...]:
        """Seconds of 1, 2, ... rows through the model, as many as fit by the profile; they do not fall."""
        limits = [clock.max_rows(kind, device, again) for kind, again in {*self._layers}]
        most = min([most, *(limit for limit in limits if limit is not None)])
        found = [sum(self._time_passes(clock, device, (rows,))) for rows in range(1, most + 1)]
        return tuple(accumulate(reversed(found), min))[::-1]

    def _time_passes(self, clock: LayerTimeModel, device: str, sizes: Sizes) -> tuple[float, float]:
        """Forward and backward of microbatches one after the other."""
        pairs = [(kind, device, rows, again) for kind, again in self._layers for rows in sizes]
        return sum(clock.forward_s(*own) for own in pairs), sum(clock.backward_s(*own) for own in pairs)

    def _copy_s(self, costs: StepCosts, rank: int, rows: int) -> float:
        """What is kept of a rank's rows, to the host or back."""
        if not self.offloads:
            return 0.0
        num_bytes = rows * sum(self._kept_bytes(kind, again) for kind, again in self._layers)
        return costs.network.time_alone([costs.network.copy(rank, num_bytes, to_device=False)])

    # -- memory ----------------------------------------------------------------------------

    def _kept_bytes(self, kind: str, recompute: Recompute) -> int:
        """What is kept of a row of one layer."""
        layer = self.inputs.workload.kinds[kind]
        inputs = layer.input_elements_per_row * self.inputs.workload.itemsize
        return inputs if recompute == "layer" else layer.activation_bytes_per_row

    def _size(self, costs: StepCosts, sizes: Sequence[Sizes]) -> tuple[Mapping[int, MinistageBytes], ...]:
        """Room for one microbatch in the layer that computes and, with offloading, for what is kept of the
        microbatches on their way to the host."""
        most_kept = max(self._kept_bytes(kind, again) for kind, again in self._layers)
        found = []
        for rank, ministages in enumerate(costs.sizes):
            largest, rows = max(sizes[rank], default=0), max(sum(sizes[rank]), 1)
            kept = ministages[0].activation_bytes_per_row
            if self.offloads:
                kept = min(kept, math.ceil(COPIES_IN_FLIGHT * most_kept * largest / rows))
            working = math.ceil(ministages[0].working_bytes_per_row * largest / rows)
            found.append(
                {0: replace(ministages[0], activation_bytes_per_row=kept, working_bytes_per_row=working)}
            )
        return tuple(found)


# -- uneven state --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Holder:
    """Ranks that are alike."""

    ranks: tuple[int, ...]
    room_bytes: float
    """On each, beside all but the sharded state."""
    even_bytes: float
    """State on each, if all ranks had as much."""


def spread_state(plan: Plan, inputs: SimulationInputs, costs: StepCosts) -> StepCosts:
    """The costs of a plan with one group whose ranks hold as much of the sharded state as they have room
    for, as evenly as that allows; what there is no room for is added evenly."""
    if not costs.memory_bytes:
        return costs
    actions = inputs.list_actions(plan, ORDER)
    alike: dict[object, list[int]] = {}
    for rank, limit_bytes in enumerate(costs.memory_bytes):
        rows = tuple(microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank))
        alike.setdefault((plan.devices[rank].type, rows, limit_bytes), []).append(rank)
    holders = []
    for ranks in alike.values():
        rank = ranks[0]
        peaks = [
            (1 + costs.allocator_share)
            * walk_memory(plan, rank, actions[rank], sizes, num_sends_kept=0).device_peak_bytes
            for sizes in (_scale(costs.sizes[rank], 0.0), costs.sizes[rank])
        ]
        context_bytes = costs.context_bytes[rank] if costs.context_bytes else 0
        room_bytes = max(0.0, costs.memory_bytes[rank] - context_bytes - peaks[0])
        holders.append(_Holder(tuple(ranks), room_bytes, max(peaks[1] - peaks[0], 1.0)))
    shares = {
        rank: share for holder, share in zip(holders, _fill(holders), strict=True) for rank in holder.ranks
    }
    return replace(
        costs,
        sizes=tuple(_scale(sizes, shares[rank]) for rank, sizes in enumerate(costs.sizes)),
        update_s={key: seconds * shares[key[0]] for key, seconds in costs.update_s.items()},
    )


def _fill(holders: Sequence[_Holder]) -> list[float]:
    """The state of each rank as a multiple of an even share: all as much, but none more than its room."""
    left = float(sum(len(holder.ranks) for holder in holders))
    shares = [0.0] * len(holders)
    most = [holder.room_bytes / holder.even_bytes for holder in holders]
    open_ranks = sum(len(holder.ranks) for holder in holders)
    for i in sorted(range(len(holders)), key=lambda i: most[i]):
        number = len(holders[i].ranks)
        shares[i] = min(most[i], left / open_ranks)
        left -= shares[i] * number
        open_ranks -= number
    total = sum(len(holder.ranks) for holder in holders)
    return [share + max(left, 0.0) / total for share in shares]


def _scale(sizes: Mapping[int, MinistageBytes], share: float) -> dict[int, MinistageBytes]:
    """What is sharded, so many times as much."""
    return {
        i: replace(
            size,
            shard_bytes=round(share * size.shard_bytes),
            kept_shard_bytes=round(share * size.kept_shard_bytes),
            gradient_shard_bytes=round(share * size.gradient_shard_bytes),
            state_bytes=round(share * size.state_bytes),
        )
        for i, size in sizes.items()
    }
