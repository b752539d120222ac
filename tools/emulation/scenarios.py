"""The runs that the cost model is held against (`runs.toml`): plans and clusters that differ in what limits
them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, Profile, Source, UpdateTime
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Ministage, Plan, Recompute
from zorselike.plan.workload import LayerKind, Workload
from zorselike.text.dataclass_tables import read_dataclass

from ..bench.plans import make_plan
from .cut_layers import TOKENS, make_kinds
from .emulation import Emulation, Limit

Stress = Literal["dependency", "collectives", "contention", "ring"]
"""What of the model a run depends on: each has a mutation that must miss there."""

SLEEP_PER_RANK_S = 0.1 / 16
"""The shortest sleep of a ministage for each rank of a run: what all ranks' actions cost together stays
under 30 % of two cores over that time."""
MIN_SLEEP_S = 0.04
REPLICA_SLEEPS = 8
"""Times as long where replicas exchange positions four times in every layer, both ways, which takes processor
time too: for all ministages of a group together."""

SPEEDS = {"A100-80": 4.0, "A100-40": 3.0, "V100-32": 2.0, "T4": 1.0}
"""How fast the emulated device types are, against each other."""

FABRIC = Link(400e6, 0.0)
"""Inside a node: fast against every network card here."""
PROFILE_ROWS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run, in relative numbers; `set_up` gives it seconds."""

    name: str
    nodes: tuple[tuple[str, ...], ...]
    """Device types, node by node; ranks follow."""
    groups: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    """Layers of each group, embedding and head included."""
    ministages: int = 1
    """Ministages of each group."""
    num_rows: int
    num_microbatches: int | tuple[int, ...]
    in_flight: tuple[int, ...] = ()
    """`max_in_flight` of each group; empty: not bounded."""
    zero: int | tuple[int, ...] = 2
    offload: tuple[str, ...] = ()
    recompute: Recompute = "none"
    nic_mb_per_s: float | None = None
    """Rate of each node's network card; None: links as fast as the fabric."""
    latency_s: float = 0.0
    shared_mb_per_s: float | None = None
    """What all nodes of the first half and all of the second have together (two regions)."""
    layer_parameters: int = 40_000
    row_elements: int = 4_096
    limit: Limit = "sleep"
    stresses: tuple[Stress, ...] = ()
    degrees: tuple[tuple[int, ...], ...] = ()
    """Ranks of each tensor-parallel replica of each group, in order; empty: all are single."""
    repeats: dict[str, int] = field(default_factory=dict)
    """How often layers multiply matrices, by device type; empty: they sleep."""

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def types(self) -> tuple[str, ...]:
        """Device type of each rank."""
        return tuple(device for node in self.nodes for device in node)

    @property
    def computes(self) -> bool:
        return bool(self.repeats)

    def speed(self, device: str) -> float:
        return 1 / self.repeats[device] if self.repeats else SPEEDS[device]


def _read_runs() -> dict[str, tuple[Scenario, ...]]:
    table = tomllib.loads((Path(__file__).parent / "runs.toml").read_text(encoding="utf-8"))

    def read(own: Mapping[str, Any]) -> Scenario:
        whole = {**table["like"][own["like"]], **own}
        nodes = tuple(tuple(table["device_of"][letter] for letter in node) for node in whole["nodes"].split())
        rest = {key: value for key, value in whole.items() if key not in ("like", "nodes")}
        return read_dataclass(Scenario, rest, own["name"], nodes=nodes)

    return {kind: tuple(map(read, runs)) for kind, runs in table["runs"].items()}


RUNS = _read_runs()
"""Runs of each kind: `sleeping`, `kernel` and `computing`; `planned` are clusters for the planner."""


def make_workload(scenario: Scenario) -> Workload:
    """Embedding, layers and head with sizes of their own."""
    width = scenario.row_elements
    if scenario.degrees:
        return _make_cut_workload(scenario)
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
            activation_bytes_per_row=8 * width,
        )
        for name, (weight, time) in shares.items()
    }
    inner = ((f"layers.{i}", "layer") for i in range(sum(scenario.layers) - 2))
    layers = (("tok_embeddings", "embedding"), *inner, ("output", "head"))
    return Workload(model="emulated", sequence_length=1, dtype="float32", layers=layers, kinds=kinds)


def _make_cut_workload(scenario: Scenario) -> Workload:
    """Of layers that real products make, which replicas share."""
    kinds = make_kinds(scenario.row_elements, {"embedding": 2e8, "layer": 1e9, "head": 5e8})
    inner = ((f"layers.{i}", "layer") for i in range(sum(scenario.layers) - 2))
    return Workload(
        model="emulated",
        sequence_length=TOKENS,
        dtype="float32",
        layers=(("tok_embeddings", "embedding"), *inner, ("output", "head")),
        kinds=kinds,
        max_tensor_parallel=max(degree for own in scenario.degrees for degree in own),
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
    shared = scenario.shared_mb_per_s
    return Cluster(
        nodes=nodes,
        default_link=Link((nic or FABRIC).bandwidth_bytes_per_s, scenario.latency_s),
        shared_links={} if shared is None else {("east", "west"): 1e6 * shared},
        name=scenario.name,
    )


def make_scenario_plan(scenario: Scenario, workload: Workload) -> Plan:
    """Rows by speed; every group's layers cut into its ministages, round robin."""
    replicas = _list_replicas(scenario)
    firsts = [[own[0] for own in group] for group in replicas]
    speeds = [scenario.speed(device) for device in scenario.types]
    for own in (own for group in replicas for own in group):
        speeds[own[0]] *= len(own)
    plan, sizes = make_plan(
        firsts,
        speeds,
        scenario.layers,
        num_rows=scenario.num_rows,
        num_microbatches=scenario.num_microbatches,
        ministages=scenario.ministages,
        zero=scenario.zero,
    )
    names = iter(name for name, _ in workload.layers)
    bounds = scenario.in_flight or [None] * len(replicas)
    groups = tuple(
        replace(
            group,
            max_in_flight=bound,
            ranks=tuple(own[0] if len(own) == 1 else own for own in of_group),
            offload=scenario.offload,
            recompute=scenario.recompute,
        )
        for group, of_group, bound in zip(plan.groups, replicas, bounds, strict=True)
    )
    ministages = tuple(
        Ministage(ministage.group, tuple(next(names) for _ in range(size)))
        for ministage, size in zip(plan.ministages, sizes, strict=True)
    )
    length = workload.sequence_length if scenario.degrees else None
    return replace(plan, groups=groups, ministages=ministages, sequence_length=length).validate()


def _list_replicas(scenario: Scenario) -> list[list[tuple[int, ...]]]:
    """Of each group."""
    if not scenario.degrees:
        return [[(rank,) for rank in group] for group in scenario.groups]
    found = []
    for group, degrees in zip(scenario.groups, scenario.degrees, strict=True):
        edges = pairwise(accumulate(degrees, initial=0))
        found.append([tuple(group[start:stop]) for start, stop in edges])
    return found


def make_profile(scenario: Scenario, workload: Workload, unit_s: float) -> Profile:
    """A row through a layer takes `unit_s` on a device of speed 1, and every pass half a row more."""
    source = Source("given", note="emulated")

    def time_layer(device: str, kind: LayerKind, degree: int = 1) -> LayerTimes:
        row_s = unit_s * kind.forward_flops_per_row / 1e9 / scenario.speed(device) / degree
        forward_s = tuple(row_s * (rows + 0.5) for rows in PROFILE_ROWS)
        return LayerTimes(
            kind=kind.name,
            device=device,
            dtype=workload.dtype,
            sequence_length=workload.sequence_length,
            tensor_parallel=degree,
            rows=PROFILE_ROWS,
            forward_s=forward_s,
            backward_s=tuple(2 * seconds for seconds in forward_s),
            source=source,
        )

    types = tuple(dict.fromkeys(scenario.types))
    updates = tuple(
        UpdateTime(
            device=device,
            dtype=workload.dtype,
            seconds_per_parameter=unit_s / scenario.layer_parameters / scenario.speed(device),
            source=source,
        )
        for device in types
    )
    layers = tuple(time_layer(device, kind) for device in types for kind in workload.kinds.values())
    degrees = sorted({degree for own in scenario.degrees for degree in own if degree > 1})
    layers += tuple(
        time_layer(device, workload.kinds["layer"], degree) for device in types for degree in degrees
    )
    return Profile(model=workload.model, layers=layers, updates=updates)


def find_shortest_s(plan: Plan, workload: Workload, cluster: Cluster, profile: Profile) -> float:
    """The shortest forward of a microbatch through a ministage."""
    places = cluster.place_ranks(plan)
    clock = LayerTimeModel(profile, workload)

    def forward_s(module: str, rank: int, num_rows: int) -> float:
        kind, device = workload.kind_of[module].name, cluster.device_type(places[rank])
        return clock.forward_s(kind, device, num_rows, "none")

    return min(
        sum(forward_s(module, microbatch.rank, microbatch.num_rows) for module in ministage.modules)
        for ministage in plan.ministages
        for microbatch in plan.groups[ministage.group].microbatches
    )


def set_up(scenario: Scenario, *, num_steps: int) -> Emulation:
    """A scenario with times so long that no forward of a ministage sleeps less than all its ranks need to
    fit two cores."""
    workload, cluster = make_workload(scenario), make_cluster(scenario)
    plan = make_scenario_plan(scenario, workload)
    wanted_s = max(MIN_SLEEP_S, SLEEP_PER_RANK_S * plan.num_ranks)
    if scenario.degrees:
        wanted_s *= REPLICA_SLEEPS / scenario.ministages
    unit_s = wanted_s / find_shortest_s(plan, workload, cluster, make_profile(scenario, workload, 1.0))
    return Emulation(
        plan=plan,
        workload=workload,
        cluster=cluster,
        profile=make_profile(scenario, workload, unit_s),
        limit=scenario.limit,
        repeats=scenario.repeats,
        num_steps=num_steps,
    )


def count_kinds(scenarios: Sequence[Scenario]) -> dict[str, int]:
    """How many runs there are of which kind, for the report."""
    return {
        "all": len(scenarios),
        "limited by the kernel": sum(own.limit == "kernel" for own in scenarios),
        "computing": sum(own.computes for own in scenarios),
        "sleeping limit": sum(own.limit == "sleep" and not own.computes for own in scenarios),
    }
