"""One simulated run of Zorse: a model on groups of a cluster, with the authors' layer times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from zorselike.cost.assemble import make_costs
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.memory import walk_memory
from zorselike.cost.profile import Overheads, Profile, Source
from zorselike.cost.sizes import measure_ministages
from zorselike.cost.step_costs import StepCosts
from zorselike.plan.cluster.cluster import Cluster, Place
from zorselike.plan.plan import Device, Plan
from zorselike.plan.workload import Workload
from zorselike.schedule.actions import SENDS, Action
from zorselike.schedule.build import build
from zorselike.schedule.spec import ScheduleSpec
from zorselike.simulator import Simulation, simulate

from .closed_form import estimate_step_s
from .paper import CONTEXT_BYTES, PEAK_TFLOPS, PaperCluster, intra_bandwidth
from .plans import Options, lay_plan, share_out
from .times import read_profile, read_workload

CAUTION = 0.5
"""Share of the layers that do not fit, in proportion, that is taken away at a time."""

FINALISTS = 2
"""How many of the options that fit are simulated, the best by the closed form."""


@dataclass(frozen=True)
class Setup:
    """A model on a cluster that is divided into groups."""

    cluster: Cluster
    workload: Workload
    profile: Profile
    groups: tuple[tuple[Place, ...], ...]
    """Devices of each group, in pipeline order."""
    global_batch: int
    """Rows."""

    @property
    def places(self) -> list[Place]:
        """Place of each rank."""
        return [place for group in self.groups for place in group]

    @property
    def ranks(self) -> list[tuple[int, ...]]:
        """Ranks of each group."""
        numbers = iter(range(len(self.places)))
        return [tuple(next(numbers) for _ in group) for group in self.groups]

    @cached_property
    def clock(self) -> LayerTimeModel:
        return LayerTimeModel(self.profile, self.workload)

    @property
    def num_layers(self) -> int:
        return sum(kind == "layer" for _, kind in self.workload.layers)

    def device(self, rank: int) -> str:
        return self.cluster.device_type(self.places[rank])

    def layer_rate(self, device: str, rows: int) -> float:
        """Rows per second through one layer, forward and backward, recomputed."""
        forward = self.clock.forward_s("layer", device, rows, "layer")
        return rows / (forward + self.clock.backward_s("layer", device, rows, "layer"))


def make_setup(folder: Path, model: str, paper: PaperCluster) -> Setup:
    """A cell of Table 5, its groups ordered by their bandwidth inside (4.3.3).

    Args:
        folder: with the authors' files.
        model: `7b`, `13b`, `33b` or `65b`.
    """
    groups = sorted(paper.groups, key=lambda nodes: -intra_bandwidth(paper.cluster, nodes))
    overheads = Overheads(context_bytes=CONTEXT_BYTES, source=Source("given", note="assumed"))
    return Setup(
        cluster=paper.cluster,
        workload=read_workload(folder, model, paper.sequence_length),
        profile=replace(read_profile(folder, model, paper.sequence_length), overheads=overheads),
        groups=tuple(
            tuple(place for node in nodes for place in paper.cluster.places if place.node == node)
            for nodes in groups
        ),
        global_batch=paper.global_batch,
    )


@dataclass(frozen=True)
class Outcome:
    """A simulated run."""

    setup: Setup = field(repr=False)
    options: Options
    plan: Plan = field(repr=False)
    costs: StepCosts = field(repr=False)
    simulation: Simulation = field(repr=False)
    peak_bytes: tuple[int, ...]
    """The most on a device of each group; what was sent is freed once it is gone."""
    estimate_s: float
    """Seconds of a step by the closed form."""

    @property
    def tflops(self) -> float:
        """Throughput of all devices together, the recomputed forward counted."""
        flops = self.setup.workload.flops_per_row(recompute=self.options.recompute == "layer")
        return flops * self.setup.global_batch / self.simulation.iteration_s / 1e12

    @property
    def layers(self) -> list[int]:
        """Layers of each group."""
        return [count_layers(self.plan, g) for g in range(len(self.plan.groups))]

    @property
    def memory_share(self) -> float:
        """The fullest device, as a share of its memory."""
        return max(
            peak / min(self.costs.memory_bytes[rank] for rank in ranks)
            for peak, ranks in zip(self.peak_bytes, self.setup.ranks, strict=True)
        )

    @property
    def fits(self) -> bool:
        return self.memory_share <= 1

    def tflops_of(self, device: str) -> float:
        """What the devices of one type compute."""
        kinds = self.setup.workload.kind_of
        flops = 0.0
        for i, ministage in enumerate(self.plan.ministages):
            per_row = sum(
                kinds[name].forward_flops_per_row * (1 + self._recomputes(name)) + kinds[name].backward_flops
                for name in ministage.modules
            )
            own = [m for m in self.plan.group_of(i).microbatches if self.setup.device(m.rank) == device]
            flops += per_row * sum(microbatch.num_rows for microbatch in own)
        return flops / self.simulation.iteration_s / 1e12

    def hfu_of(self, device: str) -> float:
        """As a share of those devices' peak."""
        number = sum(self.setup.device(rank) == device for rank in range(self.plan.num_ranks))
        return self.tflops_of(device) / (number * PEAK_TFLOPS[device])

    def _recomputes(self, module: str) -> bool:
        return self.options.recompute == "layer" and module.startswith("layers.")


def count_layers(plan: Plan, group: int) -> int:
    """Layers of a group, without embedding, norm and head."""
    stages = (plan.ministages[i] for i in plan.ministages_of_group(group))
    return sum(name.startswith("layers.") for stage in stages for name in stage.modules)


def compute_bound_tflops(setup: Setup) -> float:
    """What the devices reach if all compute layers all the time, each at its best number of rows measured."""
    layer = setup.workload.kinds["layer"]
    flops = 2 * layer.forward_flops_per_row + layer.backward_flops
    best: dict[str, float] = {}
    for times in setup.profile.layers:
        best[times.device] = max(setup.layer_rate(times.device, rows) for rows in times.rows)
    return sum(best[setup.cluster.device_type(place)] for place in setup.places) * flops / 1e12


def fit_plan(setup: Setup, options: Options, *, bounded: bool = True) -> Plan | None:
    """Layers to groups by their speed, fewer where they do not fit; None where nothing fits.

    Args:
        bounded: False: by speed alone, whatever fits.
    """
    rates = [
        setup.layer_rate(setup.device(rank), options.rows_per_microbatch) for rank in range(len(setup.places))
    ]
    speeds = [sum(rates[rank] for rank in ranks) for ranks in setup.ranks]
    taken = [0.0] * len(speeds)
    taken[-1] = _head_in_layers(setup.workload)
    caps: dict[int, int] = {}
    while True:
        layers = share_out(setup.num_layers, speeds, taken=taken, caps=caps)
        if layers is None or 0 in layers:
            return None
        plan = _name_devices(
            lay_plan(setup.workload, setup.ranks, rates, layers, setup.global_batch, options), setup
        )
        over = _find_overfull(setup, plan, options) if bounded else {}
        if not over:
            return plan
        caps |= {g: layers[g] - max(1, int(layers[g] * share * CAUTION)) for g, share in over.items()}


def _head_in_layers(workload: Workload) -> float:
    """The head's time, by FLOPs, in layers that are recomputed."""
    head, layer = workload.kinds["head"], workload.kinds["layer"]
    return (head.forward_flops_per_row + head.backward_flops) / (
        2 * layer.forward_flops_per_row + layer.backward_flops
    )


def _name_devices(plan: Plan, setup: Setup) -> Plan:
    nodes = setup.cluster.nodes
    devices = tuple(
        Device(rank, nodes[place.node].name, place.local_rank, setup.cluster.device_type(place))
        for rank, place in enumerate(setup.places)
    )
    return replace(plan, devices=devices)


def _build(setup: Setup, plan: Plan, options: Options) -> Mapping[int, Sequence[Action]]:
    order = "1f1b" if options.order == "1f1b" else "ours"
    return build(ScheduleSpec(plan, masters=setup.workload.masters), order)


def _find_overfull(setup: Setup, plan: Plan, options: Options) -> dict[int, float]:
    """Groups of which a device needs more memory than it has, with what there is too much, as a share."""
    costs = make_costs(plan, setup.workload, setup.cluster, setup.profile)
    peaks = _find_peaks(setup, plan, _build(setup, plan, options), costs)
    limits = [min(costs.memory_bytes[rank] for rank in ranks) for ranks in setup.ranks]
    pairs = enumerate(zip(peaks, limits, strict=True))
    return {g: 1 - limit / peak for g, (peak, limit) in pairs if peak > limit}


def _find_peaks(
    setup: Setup, plan: Plan, actions: Mapping[int, Sequence[Action]], costs: StepCosts
) -> tuple[int, ...]:
    """The most on a device of each group; of equal ones the first is looked at, which has most rows.

    Sends are left out of the walk, which counts what was sent until the step ends: at the paper's size that
    would be most of the memory.
    """
    sizes = measure_ministages(plan, setup.workload)
    peaks = []
    for ranks in setup.ranks:
        of_type = {setup.device(rank): rank for rank in reversed(ranks)}
        walks = [
            walk_memory(
                plan,
                rank,
                [action for action in actions[rank] if action.kind not in SENDS],
                sizes[rank],
                context_bytes=costs.context_bytes[rank],
            )
            for rank in of_type.values()
        ]
        peaks.append(max(walk.device_peak_bytes for walk in walks))
    return tuple(peaks)


def run_plan(setup: Setup, options: Options, plan: Plan) -> Outcome:
    """Simulates a plan."""
    costs = make_costs(plan, setup.workload, setup.cluster, setup.profile)
    actions = _build(setup, plan, options)
    return Outcome(
        setup,
        options,
        plan,
        costs,
        simulate(plan, actions, costs),
        _find_peaks(setup, plan, actions, costs),
        estimate_step_s(plan, costs),
    )


def list_options(
    ministages: Iterable[int], rows: Iterable[int], base: Options | None = None
) -> list[Options]:
    """All pairs of both."""
    start = base or Options(1, 1)
    return [replace(start, ministages=s, rows_per_microbatch=r) for s, r in product(ministages, rows)]


def search(
    setup: Setup, options: Sequence[Options], *, finalists: int = FINALISTS, bounded: bool = True
) -> Outcome | None:
    """The fastest of some options that fit, None where none does.

    They are ranked by the closed form on plans by speed alone; down that list, the first that fit (with
    fewer layers where there is no room for more) are simulated.

    Args:
        bounded: False: whether they fit or not.
    """
    ranked = []
    for number, choice in enumerate(options):
        plan = fit_plan(setup, choice, bounded=False)
        if plan is not None:
            costs = make_costs(plan, setup.workload, setup.cluster, setup.profile)
            ranked.append((estimate_step_s(plan, costs), number))
    outcomes: list[Outcome] = []
    for _, number in sorted(ranked):
        plan = fit_plan(setup, options[number], bounded=bounded)
        if plan is not None:
            outcomes.append(run_plan(setup, options[number], plan))
        if len(outcomes) == finalists:
            break
    return min(outcomes, key=lambda outcome: outcome.simulation.iteration_s, default=None)
