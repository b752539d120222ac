"""What other systems would make of the same devices: planned by their rules, simulated on our costs.

Each takes its best setting within its rules, so that a comparison with it says something. What a system has
beside the rules named here (kernels, overheads) is not modelled: all have our layer times, our collectives
and our memory. None may use offloading unless it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from zorselike.cost.catalogue import find_device
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.errors import ClusterError, PlanError, ProfileError
from zorselike.plan.cluster.cluster import Cluster, Place
from zorselike.plan.plan import Recompute
from zorselike.plan.shares import apportion
from zorselike.planner.baselines.cephalo import find_cephalo
from zorselike.planner.baselines.even import find_data_parallel, find_even
from zorselike.planner.baselines.pipeline import find_pipeline
from zorselike.planner.baselines.replicas import AllReduces, make_replicas
from zorselike.planner.baselines.stages import Shape
from zorselike.planner.groups.bandwidths import read_bandwidths
from zorselike.planner.groups.candidates import find_groupings
from zorselike.planner.groups.order import order_by_bandwidth
from zorselike.planner.problem import PlanProblem
from zorselike.simulator.simulated_plan import Baseline

__all__ = ["Baseline", "plan_baselines"]

_DEGREES = (1, 2, 4, 8)
"""Degrees of tensor parallelism, within a node."""


def plan_baselines(problem: PlanProblem) -> tuple[Baseline, ...]:
    """The fastest type of device alone (where there are several), even shares, Whale, TorchTitan-Het,
    Cephalo and HexiScale, for the throughput of the devices that may be used.

    Of what the user fixed only `recompute` is heeded: it belongs to the task, the rest to our plan.

    Raises:
        ConfigError: As `PlanProblem.check`.
        ProfileError: Nothing is known of the speed of some device.
    """
    problem.check()
    ways: list[tuple[str, Callable[[PlanProblem, Sequence[Place]], Baseline]]] = [
        ("even shares", _plan_even),
        ("Whale", _plan_whale),
        ("TorchTitan-Het", _plan_torchtitan),
        ("HexiScale-like", _plan_hexiscale),
        ("Cephalo-like", _plan_cephalo),
    ]
    places = _choose_places(problem)
    types = [problem.cluster.device_type(place) for place in places]
    fast = [place for place, device in zip(places, types, strict=True) if device == types[0]]
    if len(fast) < len(places):
        name = f"{len(fast)} x {types[0]} alone"
        ways.insert(0, (name, lambda problem, _: _plan_even(problem, fast, name)))
    return tuple(_try(name, plan, problem, places) for name, plan in ways)


def _try(
    name: str,
    plan: Callable[[PlanProblem, Sequence[Place]], Baseline],
    problem: PlanProblem,
    places: Sequence[Place],
) -> Baseline:
    """What cannot be planned (devices that nothing joins, unknown peaks) is a baseline without a plan."""
    try:
        return plan(problem, places)
    except (ClusterError, PlanError, ProfileError) as error:
        return Baseline(name=name, how="", simulated=None, reason=str(error))


def _choose_places(problem: PlanProblem) -> list[Place]:
    """The devices that may be used, the fastest type first; with a limit the first so many."""
    places = [problem.cluster.places[device] for device in problem.usable]
    speeds = _measure_speeds(problem)
    places.sort(key=lambda place: (-speeds[problem.cluster.device_type(place)], place))
    return places[: problem.max_devices]


def _measure_speeds(problem: PlanProblem) -> dict[str, float]:
    """Rows per second of each type of device through the model, one at a time."""
    cluster, layer_times = problem.cluster, _layer_times(problem)
    types = {cluster.device_type(cluster.places[device]) for device in problem.usable}
    return {device: 1 / layer_times.model_s(device) for device in types}


def _layer_times(problem: PlanProblem) -> LayerTimeModel:
    return LayerTimeModel(problem.profile, problem.workload)


def _recompute(problem: PlanProblem) -> tuple[Recompute, ...]:
    fixed = problem.fixed.recompute
    return ("none", "layer") if fixed is None else (fixed,)


def _plan_even(problem: PlanProblem, places: Sequence[Place], name: str = "even shares") -> Baseline:
    """FSDP (Zhao et al. 2023) and DDP: one group, every device with as many rows, the best ZeRO stage."""
    return find_even(name, problem.setting, places, problem.global_batch, recompute=_recompute(problem))


def _plan_whale(problem: PlanProblem, places: Sequence[Place]) -> Baseline:
    """Whale (Jia et al. 2022, section 3.3.1): rows in proportion to peak FLOP/s, as Poplar compares itself
    with it (Poplar, section 4.1): one group, the best ZeRO stage, the largest microbatches that fit."""
    cluster, dtype = problem.cluster, problem.workload.dtype
    peaks = []
    for device in (cluster.device_type(place) for place in places):
        peak = find_device(device).peak_flops.get(dtype)
        if not peak:
            raise ProfileError(f"the device catalogue has no peak of {device} for {dtype}")
        peaks.append(peak)
    rows = apportion(problem.global_batch, peaks)
    return find_data_parallel("Whale", problem.setting, places, rows, recompute=_recompute(problem))


def _plan_cephalo(problem: PlanProblem, places: Sequence[Place]) -> Baseline:
    """Cephalo (Guo et al. 2025): `planner/baselines/cephalo.py`."""
    return find_cephalo(problem.setting, places, problem.global_batch, recompute=_recompute(problem))


def _plan_torchtitan(problem: PlanProblem, places: Sequence[Place]) -> Baseline:
    """TorchTitan-Het (Zorse, section 6.1): a rectangular mesh of pipeline, ZeRO-2 data parallelism and tensor
    parallelism inside a node, even rows, layers cut unevenly to balance stages; all degrees are tried, with
    the fastest devices first in the pipeline or last."""
    shapes = _list_meshes(problem, places, AllReduces(problem.setting), evenly=True)
    return find_pipeline(
        "TorchTitan-Het", shapes, problem.global_batch, _layer_times(problem), recompute=_recompute(problem)
    )


def _list_meshes(
    problem: PlanProblem, places: Sequence[Place], all_reduces: AllReduces, *, evenly: bool
) -> Iterator[Shape]:
    """Stages of as many devices each, with one degree of tensor parallelism in all."""
    near = sorted(places, key=lambda place: problem.cluster.nodes[place.node].region)
    num_layers = len(problem.workload.layers)
    for ordered in dict.fromkeys((tuple(near), tuple(reversed(near)))):
        for degree in _DEGREES:
            for width in range(degree, len(places) + 1, degree):
                if len(places) % width or len(places) // width > num_layers:
                    continue
                groups = [ordered[start : start + width] for start in range(0, len(places), width)]
                replicas = make_replicas(problem.setting, all_reduces, groups, degree)
                if all(replicas.degree(place) == degree for place in replicas.members):
                    yield Shape(replicas, evenly)


def _plan_hexiscale(problem: PlanProblem, places: Sequence[Place]) -> Baseline:
    """HexiScale (Yan et al. 2024) as Zorse compares itself with it (section 6.1): stages of any devices, with
    tensor parallelism inside a node and rows by speed, ZeRO 2. Stages are the candidates of our own search
    (`planner/groups/candidates.py`) and TorchTitan's; tensor parallelism is the same in all, or what a
    stage's part of a node allows of it."""
    all_reduces = AllReduces(problem.setting)
    shapes = chain(
        _list_asymmetric(problem, places, all_reduces),
        _list_meshes(problem, places, all_reduces, evenly=False),
    )
    return find_pipeline(
        "HexiScale-like", shapes, problem.global_batch, _layer_times(problem), recompute=_recompute(problem)
    )


def _list_asymmetric(
    problem: PlanProblem, places: Sequence[Place], all_reduces: AllReduces
) -> Iterator[Shape]:
    """Stages of any devices."""
    cluster = problem.cluster
    bandwidths = read_bandwidths(cluster, _find_devices(cluster, places), span_regions=problem.spans_regions)
    num_nodes = len({place.node for place in places})
    max_groups = min(len(problem.workload.layers), len(places), 2 * num_nodes)
    for grouping in find_groupings(bandwidths, max_groups=max_groups):
        order = order_by_bandwidth(bandwidths, grouping.groups)
        groups = [tuple(cluster.places[device] for device in grouping.groups[g]) for g in order]
        for degree in _DEGREES:
            yield Shape(make_replicas(problem.setting, all_reduces, groups, degree), evenly=False)


def _find_devices(cluster: Cluster, places: Sequence[Place]) -> list[int]:
    number = {place: device for device, place in enumerate(cluster.places)}
    return [number[place] for place in places]
