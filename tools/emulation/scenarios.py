"""The runs that the cost model is held against: plans and clusters that differ in what limits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, Profile, Source, UpdateTime
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Ministage, Plan, Recompute
from zorselike.plan.workload import LayerKind, Workload

from ..bench.plans import make_plan
from .emulation import Emulation, Limit
from .model import DeviceTimes

Stress = Literal["dependency", "collectives", "contention", "ring"]
"""What of the model a run depends on: each has a mutation that must miss there."""

SLEEP_PER_RANK_S = 0.1 / 16
"""The shortest sleep of a ministage for each rank of a run: what all ranks' actions cost together stays
under 30 % of two cores over that time."""
MIN_SLEEP_S = 0.04

SPEEDS = {"A100-80": 4.0, "A100-40": 3.0, "V100-32": 2.0, "T4": 1.0}
"""How fast the emulated device types are, against each other."""

FABRIC = Link(400e6, 0.0)
"""Inside a node: fast against every network card here."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run, in relative numbers; `emulate` gives it seconds."""

    name: str
    nodes: tuple[tuple[str, ...], ...]
    """Device types, node by node; ranks follow."""
    groups: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    """Layers of each group, embedding and head included."""
    ministages: int = 1
    """Ministages of each group."""
    num_rows: int = 16
    num_microbatches: int = 8
    zero: int | tuple[int, ...] = 2
    offload: tuple[str, ...] = ()
    recompute: Recompute = "none"
    nic_mb_per_s: float | None = None
    """Rate of each node's network card; None: links as fast as the fabric."""
    latency_s: float = 0.0
    pair_mb_per_s: tuple[tuple[int, int, float], ...] = ()
    """Slower links between two nodes."""
    shared_mb_per_s: float | None = None
    """What all nodes of the first half and all of the second have together (two regions)."""
    layer_parameters: int = 40_000
    row_elements: int = 4_096
    dtype: str = "float32"
    limit: Limit = "sleep"
    computes: bool = False
    stresses: tuple[Stress, ...] = ()
    speeds: dict[str, float] = field(default_factory=lambda: dict(SPEEDS))

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def num_types(self) -> int:
        return len({device for node in self.nodes for device in node})


def make_workload(scenario: Scenario) -> Workload:
    """Embedding, layers and head with sizes of their own."""
    itemsize = 4 if scenario.dtype == "float32" else 2
    width = scenario.row_elements
    shares = {"embedding": (0.5, 0.2), "layer": (1.0, 1.0), "head": (0.5, 0.5)}
    if scenario.computes:  # They all multiply the same matrix.
        shares = dict.fromkeys(shares, (1.0, 1.0))
    kinds = {
        name: LayerKind(
            name=name,
            num_parameters=int(weight * scenario.layer_parameters),
            forward_flops_per_row=1e9 * time,
            input_elements_per_row=width,
            output_elements_per_row=width,
            activation_bytes_per_row=2 * width * itemsize,
        )
        for name, (weight, time) in shares.items()
    }
    inner = sum(scenario.layers) - 2
    layers = (("tok_embeddings", "embedding"), *((f"layers.{i}", "layer") for i in range(inner)))
    return Workload(
        model="emulated",
        sequence_length=1,
        dtype=scenario.dtype,
        layers=(*layers, ("output", "head")),
        kinds=kinds,
    )


def make_cluster(scenario: Scenario) -> Cluster:
    """Nodes in two regions, their cards and the links between them."""
    nic = None if scenario.nic_mb_per_s is None else Link(1e6 * scenario.nic_mb_per_s)
    half = len(scenario.nodes) / 2
    nodes = tuple(
        Node(
            name=f"n{i}",
            devices=devices,
            region="west" if i < half else "east",
            fabric=FABRIC if len(devices) > 1 else None,
            nic=nic,
        )
        for i, devices in enumerate(scenario.nodes)
    )
    between = FABRIC.bandwidth_bytes_per_s if nic is None else nic.bandwidth_bytes_per_s
    shared = scenario.shared_mb_per_s
    return Cluster(
        nodes=nodes,
        node_links={
            (f"n{a}", f"n{b}"): Link(1e6 * rate, scenario.latency_s) for a, b, rate in scenario.pair_mb_per_s
        },
        default_link=Link(between, scenario.latency_s),
        shared_links={} if shared is None else {("east", "west"): 1e6 * shared},
        name=scenario.name,
    )


def make_scenario_plan(scenario: Scenario, workload: Workload) -> Plan:
    """Rows by speed; every group's layers cut into its ministages, round robin."""
    types = [device for node in scenario.nodes for device in node]
    plan, sizes = make_plan(
        scenario.groups,
        [scenario.speeds[device] for device in types],
        scenario.layers,
        num_rows=scenario.num_rows,
        num_microbatches=scenario.num_microbatches,
        ministages=scenario.ministages,
        zero=scenario.zero if isinstance(scenario.zero, int) else list(scenario.zero),
    )
    names = iter(name for name, _ in workload.layers)
    groups = tuple(
        replace(group, offload=scenario.offload, recompute=scenario.recompute) for group in plan.groups
    )
    ministages = tuple(
        Ministage(ministage.group, tuple(next(names) for _ in range(size)))
        for ministage, size in zip(plan.ministages, sizes, strict=True)
    )
    return replace(plan, groups=groups, ministages=ministages).validate()


PROFILE_ROWS = (1, 2, 4, 8, 16, 32)


def make_profile(scenario: Scenario, workload: Workload, unit_s: float) -> Profile:
    """A row through a layer takes `unit_s` on a device of speed 1, and every pass half a row more."""
    source = Source("given", note="emulated")
    layers = []
    for device in dict.fromkeys(device for node in scenario.nodes for device in node):
        for name, kind in workload.kinds.items():
            row_s = unit_s * kind.forward_flops_per_row / 1e9 / scenario.speeds[device]
            forward_s = tuple(row_s * (rows + 0.5) for rows in PROFILE_ROWS)
            layers.append(
                LayerTimes(
                    kind=name,
                    device=device,
                    dtype=workload.dtype,
                    sequence_length=1,
                    rows=PROFILE_ROWS,
                    forward_s=forward_s,
                    backward_s=tuple(2 * seconds for seconds in forward_s),
                    source=source,
                )
            )
    updates = tuple(
        UpdateTime(
            device=device,
            dtype=workload.dtype,
            seconds_per_parameter=unit_s / scenario.layer_parameters / scenario.speeds[device],
            source=source,
        )
        for device in dict.fromkeys(times.device for times in layers)
    )
    return Profile(model=workload.model, layers=tuple(layers), updates=updates)


def find_shortest_s(plan: Plan, workload: Workload, cluster: Cluster, profile: Profile) -> float:
    """The shortest forward of a microbatch through a ministage."""
    places = cluster.place_ranks(plan)
    clock = LayerTimeModel(profile, workload)
    return min(
        sum(
            clock.forward_s(
                workload.kind_of[module].name,
                cluster.device_type(places[microbatch.rank]),
                microbatch.num_rows,
                "none",
            )
            for module in ministage.modules
        )
        for ministage in plan.ministages
        for microbatch in plan.groups[ministage.group].microbatches
    )


def find_time_scale(plan: Plan, workload: Workload, cluster: Cluster, profile: Profile) -> float:
    """The factor by which sleeps must be longer for all ranks to fit two cores."""
    wanted_s = max(MIN_SLEEP_S, SLEEP_PER_RANK_S * plan.num_ranks)
    return wanted_s / find_shortest_s(plan, workload, cluster, profile)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A scenario with seconds and bytes."""

    scenario: Scenario
    emulation: Emulation
    profile: Profile


def set_up(scenario: Scenario, *, num_steps: int) -> Setup:
    """A scenario with times so long that no forward of a ministage sleeps less than its ranks need."""
    workload = make_workload(scenario)
    plan = make_scenario_plan(scenario, workload)
    cluster = make_cluster(scenario)
    unit = make_profile(scenario, workload, 1.0)
    profile = make_profile(scenario, workload, find_time_scale(plan, workload, cluster, unit))
    emulation = Emulation(
        plan=plan,
        workload=workload,
        cluster=cluster,
        times=DeviceTimes(profile, workload),
        limit=scenario.limit,
        num_steps=num_steps,
    )
    return Setup(scenario=scenario, emulation=emulation, profile=profile)


def count_kinds(scenarios: Sequence[Scenario]) -> dict[str, int]:
    """How many runs there are of which kind, for the report."""
    return {
        "all": len(scenarios),
        "limited by the kernel": sum(own.limit == "kernel" for own in scenarios),
        "computing": sum(own.computes for own in scenarios),
        "sleeping limit": sum(own.limit == "sleep" and not own.computes for own in scenarios),
    }
