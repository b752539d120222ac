"""Pipelines of replicas in 1F1B: what Megatron-LM, TorchTitan and HexiScale have in common.

Each stage is a data-parallel group of replicas with consecutive layers, cut exactly for speed within
memory (`planner/layers/split_layers.py`), or as many everywhere. The batch goes through in rounds of the same
rows in all stages, a microbatch of each replica in each round. All shapes that are asked for are estimated
with every size of round, with and without recomputation; the best few are simulated, and the fastest that
fits by the walk over its memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from zorselike.cost.sizes import GATHERS_PER_LAYER, is_layer
from zorselike.plan.plan import GradReduce, Group, Microbatch, Plan, Recompute
from zorselike.plan.workload import LayerKind
from zorselike.planner.baselines.even import ORDER, Misfit, find_misfit
from zorselike.planner.baselines.replicas import Members
from zorselike.planner.baselines.stages import Stages
from zorselike.planner.candidate.to_plan import assemble_plan
from zorselike.planner.layers.split_layers import (
    GroupCosts,
    LayerSplit,
    bound_slowest_s,
    split_layers,
    visit_in_turn,
)
from zorselike.simulator.simulated_plan import Baseline, SimulatedPlan
from zorselike.text.wording import count

INTERLEAVED = "interleaved"
"""The order of several parts a stage."""
FINALISTS = 6
"""Choices that fit by estimate and are simulated."""
ENTERED = 16
"""So many may turn out not to fit, or not to be as fast as estimated, before a good one is overlooked."""
MOST_ROUNDS = 1024
"""Of more rounds there are only where fewer do not fit: filling the pipeline takes next to nothing then."""
MOST_FITTINGS = 6
"""How often layers are cut anew where the walk over memory finds more than the estimate."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a system does with stages."""

    zero: int = 2
    grad_reduce: tuple[GradReduce, ...] = ("once", "microbatch")
    """What may be chosen, the next where nothing fits."""
    equal_layers: tuple[int, ...] = ()
    """As many layers in all parts of the model, of which each stage has so many, in turn; empty: cut for
    speed, one part a stage."""


def find_pipeline(
    name: str,
    shapes: Iterable[Stages],
    global_batch: int,
    rules: Rules,
    *,
    recompute: Sequence[Recompute],
) -> Baseline:
    """The fastest pipeline of some shapes that fits; `recompute` is what may be chosen."""
    ranking = _Ranking(rules)
    for stages in shapes:
        for again in recompute:
            ranking.enter(stages, global_batch, again)
    fitting: list[tuple[SimulatedPlan, str]] = []
    reason = ""
    for estimate, split in ranking.list_unlike():
        simulated = estimate.fit(split)
        if isinstance(simulated, SimulatedPlan):
            fitting.append((simulated, estimate.describe(simulated)))
        else:
            reason = reason or simulated
        if len(fitting) == FINALISTS:
            break
    if fitting:
        best, how = min(fitting, key=lambda pair: pair[0].simulation.iteration_s)
        return Baseline(name=name, how=how, simulated=best)
    return Baseline(name=name, how="", simulated=None, reason=reason or ranking.explain())


class _Ranking:
    """All that fits by estimate and may be among the best few."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.found: list[tuple[float, int, _Estimate, LayerSplit]] = []
        self._tried: list[_Estimate] = []
        self._best: list[float] = []

    def enter(self, stages: Stages, global_batch: int, recompute: Recompute) -> None:
        """Ever larger rounds, until they get slower or do not fit; of those of which a step has thousands, as
        of batches of thousands of rows, only where others do not fit."""
        fewest = max(len(group) for group in stages.groups)
        usual = fewest * 2 ** max(0, math.ceil(math.log2(global_batch / fewest / MOST_ROUNDS)))
        for num_parts in self._rules.equal_layers or (1,):
            for first, most in ((usual, global_batch), (fewest, usual - 1)):
                before, choice = math.inf, _Choice(first, recompute, num_parts)
                while choice.rows <= most:
                    step_s = self._estimate(stages, global_batch, choice)
                    if step_s is not None:
                        if step_s > before or math.isinf(step_s):
                            break
                        before = step_s
                    choice = choice._replace(rows=2 * choice.rows)
                if choice.rows > first:
                    break

    def _estimate(self, stages: Stages, global_batch: int, choice: _Choice) -> float | None:
        """Seconds with gradients reduced once a step or, where that does not fit, in each round; infinite
        where neither fits, None where it cannot be among the best or is no such pipeline."""
        for grad_reduce in self._rules.grad_reduce:
            estimate = _Estimate(self._rules, stages, global_batch, choice, grad_reduce)
            if not estimate.is_possible:
                return None
            if not stages.takes(estimate.rows, choice.recompute):
                return math.inf
            self._tried.append(estimate)
            if len(self._best) == ENTERED and estimate.bound_s() > self._best[-1]:
                return None
            split = estimate.cut()
            if split is not None:
                step_s = estimate.step_s(split)
                self.found.append((step_s, len(self.found), estimate, split))
                self._best = sorted([*self._best, step_s])[:ENTERED]
                return step_s
        return math.inf

    def list_unlike(self) -> list[tuple[_Estimate, LayerSplit]]:
        """The fastest first; of shapes that only interchange equal nodes one."""
        unlike = {
            (step_s, estimate.rows, split.ends): (estimate, split)
            for step_s, _, estimate, split in sorted(self.found, key=lambda entry: entry[:2], reverse=True)
        }
        return list(unlike.values())[::-1]

    def explain(self) -> str:
        """What the least that was tried lacks."""
        if not self._tried:
            return "these devices, or so few rows, have no such shape"
        return min(estimate.lack() for estimate in self._tried)[1]


class _Choice(NamedTuple):
    """What is tried of a shape."""

    rows: int
    """Of a round."""
    recompute: Recompute
    num_parts: int
    """Of the model that each stage has."""


class _Estimate:
    """One shape with one choice."""

    def __init__(
        self, rules: Rules, stages: Stages, global_batch: int, choice: _Choice, grad_reduce: GradReduce
    ) -> None:
        rows, recompute, self._num_parts = choice
        self._rules, self._stages, self._global_batch = rules, stages, global_batch
        self._recompute, self._grad_reduce = recompute, grad_reduce
        self._num_rounds = -(-global_batch // rows)
        widest = max(len(group) for group in stages.groups)
        if global_batch < self._num_rounds * widest:  # The last rounds are to have rows for all.
            self._num_rounds = global_batch // widest
        self.rows = -(-global_batch // self._num_rounds)
        """Rows of the largest round."""
        self._shares = [stages.share(g, self.rows, recompute) for g in range(len(stages.groups))]

    @property
    def is_possible(self) -> bool:
        """Whether the order of several parts a stage exists, and equal layers where they are asked for."""
        num_stages = len(self._stages.groups)
        if self._num_parts > 1 and (num_stages == 1 or self._num_rounds % num_stages):
            return False
        return not self._rules.equal_layers or bool(self._cut_equally())

    @property
    def _order(self) -> str:
        return ORDER if self._num_parts == 1 else INTERLEAVED

    # -- cutting layers --------------------------------------------------------------------

    def cut(self, squeezed: Mapping[int, float] | None = None) -> LayerSplit | None:
        """Layers to stages for speed; None where they do not fit.

        Args:
            squeezed: for some stages, the share of their room that is used.
        """
        groups = [
            GroupCosts(self._time_kinds(g), self._fill_kinds(g), (squeezed or {}).get(g, 1.0))
            for g in range(len(self._stages.groups))
        ]
        return self._split(groups)

    def bound_s(self) -> float:
        """No cut takes less."""
        groups = [GroupCosts(self._time_kinds(g)) for g in range(len(self._stages.groups))]
        return self._num_rounds * bound_slowest_s(self._stages.kinds, groups)

    def _split(self, groups: Sequence[GroupCosts]) -> LayerSplit | None:
        kinds = self._stages.kinds
        if not self._rules.equal_layers:
            return split_layers(kinds, range(len(groups)), groups) if len(groups) <= len(kinds) else None
        ends = self._cut_equally()
        owners = visit_in_turn(len(groups), len(ends))
        seconds, num_bytes = [0.0] * len(groups), [0.0] * len(groups)
        for g, (start, stop) in zip(owners, pairwise((0, *ends)), strict=True):
            seconds[g] += sum(groups[g].seconds[kind] for kind in kinds[start:stop])
            num_bytes[g] += sum(groups[g].num_bytes.get(kind, 0.0) for kind in kinds[start:stop])
        if any(own > group.max_bytes for own, group in zip(num_bytes, groups, strict=True)):
            return None
        return LayerSplit(owners, ends, tuple(seconds), is_exact=True)

    def _cut_equally(self) -> tuple[int, ...]:
        """The ends of parts with as many layers each, what is before and behind these in the first and the
        last; empty where the number of layers is no multiple."""
        layers = [i for i, module in enumerate(self._stages.modules) if is_layer(module)]
        num_parts = self._num_parts * len(self._stages.groups)
        each, more = divmod(len(layers), num_parts)
        if more or not each:
            return ()
        return (*layers[each::each], len(self._stages.modules))

    def lack(self) -> tuple[float, str]:
        """How many times its memory some device would need at least, by the estimate; and which, in words."""
        filled = [GroupCosts(self._fill_kinds(g)) for g in range(len(self._stages.groups))]
        split = self._split(filled)
        if split is None:
            return math.inf, f"{count(len(filled), 'stage')} for {count(len(self._stages.kinds), 'layer')}"
        g = max(range(len(filled)), key=lambda g: split.group_s[g])
        rank = self._stages.ranks[g][0][0]
        members = self._stages.groups[g][0]
        limit_bytes = self._stages.memory_bytes(members)
        if math.isinf(limit_bytes):
            return 0.0, "it does not fit"
        outside_bytes = limit_bytes - self._stages.room_bytes(members)
        peak_bytes = outside_bytes + self._stages.room_bytes(members) * split.slowest_s
        misfit = Misfit(rank, round(peak_bytes), round(limit_bytes))
        return split.slowest_s, misfit.explain(self._lay(split, 1))

    def _time_kinds(self, g: int) -> dict[str, float]:
        """Seconds of a round of one layer of each kind, its share of what comes once a step included."""
        stages, pairs = self._stages, self._list_unlike(g)
        num_reductions = self._num_rounds if self._grad_reduce == "microbatch" else 1
        found = {}
        for name, kind in stages.workload.kinds.items():
            compute_s = max(stages.seconds(members, name, rows, self._recompute) for members, rows in pairs)
            collectives_s = stages.gather_s(g, kind) + num_reductions * stages.reduce_s(g, kind)
            found[name] = compute_s + collectives_s / self._num_rounds
        return found

    def _list_unlike(self, g: int) -> list[tuple[Members, int]]:
        """Replicas of a stage and their rows, of those that are alike one."""
        stages = self._stages
        pairs = zip(stages.groups[g], self._shares[g], strict=True)
        return list(
            {
                (members[0].node, stages.device(members), len(members), rows): (members, rows)
                for members, rows in pairs
            }.values()
        )

    def _fill_kinds(self, g: int) -> dict[str, float]:
        """What one layer of each kind takes of the room on the replica that has least for it."""
        stages = self._stages
        pairs = self._list_unlike(g)
        num_kept = self._count_kept(g)
        found = {}
        for name, kind in stages.workload.kinds.items():
            found[name] = max(
                self._held_bytes(kind, g, len(members), rows, num_kept)
                / max(stages.room_bytes(members) - self._working_bytes(rows, len(members)), 1.0)
                for members, rows in pairs
            )
        return found

    def _count_kept(self, g: int) -> float:
        """Microbatches under way of all that a stage has; a part of it counts as that part of one."""
        num_stages, num_parts = len(self._stages.groups), self._num_parts
        if num_parts == 1:
            return min(num_stages - g, self._num_rounds)
        ahead = 2 * (num_stages - g - 1) + (num_parts - 1) * num_stages
        return min((ahead + 1) / num_parts, self._num_rounds)

    def _held_bytes(self, kind: LayerKind, g: int, degree: int, rows: int, num_kept: float) -> float:
        """Parameters whole and as shards, gradients, optimizer state, and activations of the microbatches
        that are under way, on each device of a replica of so many."""
        stages, replicas = self._stages, self._stages.groups[g]
        each, is_layer_kind = stages.parameter_bytes, kind.name in stages.layer_kinds
        parts = degree if is_layer_kind else 1
        num_shards = degree * len(replicas) if is_layer_kind else sum(map(len, replicas))
        whole = kind.num_parameters * each.weight
        gradients = kind.trainable * each.gradient
        shards = (whole + kind.trainable * each.state) / num_shards
        gathered = whole / parts
        gathered += gradients / (num_shards if self._grad_reduce == "microbatch" else parts)
        inputs = kind.input_elements_per_row * stages.workload.itemsize
        if is_layer_kind and self._recompute == "layer":
            kept, working = inputs / degree, 0.0
        elif is_layer_kind:
            kept = kind.activation_bytes_per_row / degree + GATHERS_PER_LAYER * inputs * (1 - 1 / degree)
            working = 0.0
        else:
            kept = kind.activation_bytes_per_row / degree
            working = kind.working_bytes_per_row / degree
        return gathered + shards + rows * (num_kept * kept + working)

    def _working_bytes(self, rows: int, degree: int) -> float:
        """What a layer needs while it computes, whichever needs most; and units on their way."""
        stages = self._stages
        layers = [kind for name, kind in stages.workload.kinds.items() if name in stages.layer_kinds]
        again = self._recompute == "layer"
        working = max(
            (kind.working_bytes_per_row + again * kind.activation_bytes_per_row for kind in layers), default=0
        )
        each = stages.parameter_bytes
        units = (max(kind.num_parameters * each.weight, kind.trainable * each.gradient) for kind in layers)
        return (rows * working + 2 * max(units, default=0)) / degree

    # -- time ------------------------------------------------------------------------------

    def step_s(self, split: LayerSplit) -> float:
        """All rounds through the slowest stage, or over the slowest boundary, and one through all others,
        of which the first part is enough."""
        passes = [
            self._stages.pass_on_s(g, self.rows, self._recompute) for g in range(len(split.group_s) - 1)
        ]
        slowest = max([*split.group_s, *(self._num_parts * own_s for own_s in passes)])
        others_s = (sum(split.group_s) - max(split.group_s)) / self._num_parts
        return (self._num_rounds - 1) * slowest + max(split.group_s) + others_s + 2 * sum(passes)

    # -- the plan --------------------------------------------------------------------------

    def fit(self, split: LayerSplit) -> SimulatedPlan | str:
        """The plan simulated, layers moved where the walk over its memory asks for it; or why none fits."""
        squeezed: dict[int, float] = {}
        reason = ""
        inputs = self._stages.inputs
        # From then on each round finds what the one before found.
        num_rounds = len(split.owners) + 2 if self._num_parts == 1 else 2 * len(self._stages.groups)
        num_rounds = min(self._num_rounds, num_rounds)
        for _ in range(MOST_FITTINGS):
            plan = self._lay(split, num_rounds)
            actions = inputs.list_actions(plan, self._order)
            misfit = find_misfit(plan, inputs.find_costs(plan), actions)
            if misfit is None:
                whole = self._lay(split, self._num_rounds)
                return inputs.simulate(whole, schedule=self._order)
            reason = reason or misfit.explain(plan)
            g = plan.group_of_rank[misfit.rank]
            used = sum(
                self._fill_kinds(g)[self._stages.workload.kind_of[name].name]
                for i in plan.ministages_of_group(g)
                for name in plan.ministages[i].modules
            )
            # A little less than what is there now, where it was less than allowed.
            allowed = min(squeezed.get(g, 1.0), used)
            squeezed[g] = min(allowed * misfit.limit_bytes / misfit.peak_bytes, allowed * (1 - 1e-6))
            following = self.cut(squeezed)
            if following is None:
                return reason
            split = following
        return reason

    def _lay(self, split: LayerSplit, num_rounds: int) -> Plan:
        """All rounds, or the first few of them."""
        groups = [
            Group(
                ranks=tuple(own[0] if len(own) == 1 else own for own in ranks),
                microbatches=self._lay_rows(g, num_rounds),
                zero=self._rules.zero,
                grad_reduce=self._grad_reduce,
                recompute=self._recompute,
            )
            for g, ranks in enumerate(self._stages.ranks)
        ]
        inputs, places = self._stages.inputs, self._stages.places
        return assemble_plan(inputs.workload, inputs.cluster, places, groups, split.ends, split.owners)

    def _start(self, m: int) -> int:
        """The first row of a round; larger rounds come first."""
        return -(-self._global_batch * m // self._num_rounds)

    def _lay_rows(self, g: int, num_rounds: int) -> tuple[Microbatch, ...]:
        """Each round's rows to the stage's replicas."""
        microbatches: list[Microbatch] = []
        for m in range(num_rounds):
            start, stop = self._start(m), self._start(m + 1)
            shares = self._stages.share(g, stop - start, self._recompute)
            cuts = pairwise(accumulate(shares, initial=start))
            microbatches += [
                Microbatch(own[0], *cut) for own, cut in zip(self._stages.ranks[g], cuts, strict=True)
            ]
        return tuple(microbatches)

    # -- words -----------------------------------------------------------------------------

    def describe(self, simulated: SimulatedPlan) -> str:
        """`4 stages of 2 x 2 devices, layers 10 12 12 6, recomputed, 4 rows a round, ZeRO 2`."""
        stages = self._stages
        sizes = []
        for group in stages.groups:
            degrees = sorted({*map(len, group)})
            sizes.append(f"{len(group)}" + "".join(f" x {degree}" for degree in degrees if degree > 1))
        together = sizes[0] if len(set(sizes)) == 1 else ", ".join(sizes)
        plan = simulated.plan
        layers = [
            sum(is_layer(name) for i in plan.ministages_of_group(g) for name in plan.ministages[i].modules)
            for g in range(len(plan.groups))
        ]
        parts = f" in {self._num_parts} parts" if self._num_parts > 1 else ""
        again = ", recomputed" if self._recompute == "layer" else ""
        often = ", reduced each round" if self._grad_reduce == "microbatch" else ""
        return (
            f"{count(len(sizes), 'stage')} of {together} devices, layers {' '.join(map(str, layers))}"
            f"{parts}{again}, {count(self.rows, 'row')} a round, ZeRO {self._rules.zero}{often}"
        )
