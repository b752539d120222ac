"""What layers cost a group of devices, by which they are shared out: seconds, and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.estimate.few_microbatches import add_largest
from zorselike.planner.estimate.memory import RankMemory
from zorselike.planner.estimate.step_time import StepTimeEstimate
from zorselike.planner.layers.split_layers import GroupCosts
from zorselike.planner.layers.waits import GroupTimes, Waits
from zorselike.planner.problem import PlanProblem


class LayerCosts:
    """Of one problem; keeps what groups have in common."""

    def __init__(
        self, problem: PlanProblem, table: LayerTable, step_time: StepTimeEstimate, memory: RankMemory
    ) -> None:
        self._problem, self._table, self._step_time, self._memory = problem, table, step_time, memory
        self._costs: dict[object, GroupCosts] = {}
        self._waits: dict[object, Waits] = {}

    def find(
        self, group: CandidateGroup, room: float, num_ministages: int, kept: Mapping[str, int]
    ) -> GroupCosts:
        """What layers cost a group: its computation and the reductions that nothing hides, or its copies
        from the host where these take longer; and what they hold."""
        returns = num_ministages if group.max_in_flight is not None else 1
        key = group, returns, tuple(kept.items()), self._memory.scale
        if key not in self._costs:
            self._costs[key] = self._find_whole_costs(group, returns, kept)
        return replace(self._costs[key], max_bytes=room * self._costs[key].max_bytes)

    def _find_whole_costs(self, group: CandidateGroup, returns: int, kept: Mapping[str, int]) -> GroupCosts:
        times = self._step_time.group_seconds(group)
        times_reduced = group.microbatches_per_device if group.mode.reduces_per_microbatch else 1
        is_beside = self._step_time.reduces_beside(group.mode, group.devices)
        seconds: dict[str, float] = {}
        for key, (forward, backward) in times.items():
            one_s = self._step_time.collect_one_s(group.mode.reduction, group, key)
            reduce_s = times_reduced * one_s
            seconds[key] = forward + (max(backward, reduce_s) if is_beside else backward + reduce_s)
        if group.mode.offload:
            seconds = {key: max(own, self._step_time.copied_s(group, key)) for key, own in seconds.items()}
        tightest = self._tightest(group, returns)
        limit = self._memory.limit_bytes(group.firsts[tightest])
        if limit is None:
            return GroupCosts(seconds)
        sizes = group.held_sizes(tightest, returns) or (0,)
        rows = {key: add_largest(sizes, kept.get(key, len(sizes))) for key in seconds}
        device = self._problem.device_types[group.firsts[tightest]]
        degree = group.degree_of(tightest)
        held = {key: self._held_bytes(key, group, rows[key], degree) for key in seconds}
        return GroupCosts(seconds, held, limit - self._problem.setting.context_bytes(device))

    def find_waits(self, candidate: CandidatePlan) -> Waits | None:
        """How long its groups wait for each other; None where these have one ministage each, or go backward
        before all is forward."""
        if candidate.bounds_in_flight or not candidate.has_rounds:
            return None
        settings = ((own.dealt, own.mode.recompute, own.microbatches_per_device) for own in candidate.groups)
        key = candidate.owners, *settings
        if key not in self._waits:
            self._waits[key] = Waits(candidate.owners, [self._find_times(own) for own in candidate.groups])
        return self._waits[key]

    def _find_times(self, group: CandidateGroup) -> GroupTimes:
        of_kinds = self._step_time.group_seconds(group)
        forward_s, backward_s = zip(*(of_kinds[key] for key in self._table.keys), strict=True)
        return GroupTimes(forward_s, backward_s, group.microbatches_per_device)

    def _tightest(self, group: CandidateGroup, num_ministages: int) -> int:
        """The replica whose devices have the least memory for a row."""

        def room(position: int) -> float:
            limit = self._memory.limit_bytes(group.firsts[position])
            held = sum(group.held_sizes(position, num_ministages))
            return math.inf if limit is None else limit * group.degree_of(position) / (1 + held)

        return min(range(len(group.sizes)), key=room)

    def _held_bytes(self, key: str, group: CandidateGroup, rows: int, degree: int) -> float:
        """What stays on a device of a replica of so many for one layer from the forward to the backward."""
        kind, each = self._table.kind(key), self._problem.parameter_bytes
        whole, state = kind.num_parameters * each.weight, kind.trainable * each.state
        is_cut = bool(group.degrees) and self._table.is_cut(key)
        num_shards = group.count_shards_of(is_cut=is_cut, degree=degree)
        held = 0.0 if "params" in group.mode.offload else whole / num_shards
        held += 0.0 if "optimizer" in group.mode.offload else state / num_shards
        if group.mode.zero < 2:
            held += whole / degree if is_cut else whole
        if "activations" not in group.mode.offload:
            held += rows * self._table.kept_bytes(key, group.mode.recompute, degree)
        return held
