"""Simulated steps of Poplar's experiments: one data-parallel group, rows dealt in several ways."""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.memory import walk_memory
from zorselike.cost.profile import Overheads, Profile, Source
from zorselike.cost.sizes import measure_ministages
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.plan.shares import deal_rows
from zorselike.plan.workload import Workload
from zorselike.planner.rows.share_rows import RankCosts
from zorselike.simulator.engine import simulate
from zorselike.simulator.inputs import SimulationInputs
from zorselike.simulator.simulated_plan import SimulatedPlan
from zorselike.text.dataclass_tables import read_dataclass

from ..zorse.paper import CONTEXT_BYTES, GB, GBIT, make_cluster
from ..zorse.times import read_profile, read_workload, spell_model

TOKENS_PER_STEP = 2**21
"""Global batch: 2 million tokens."""
PCIE_BYTES_PER_S = 10 * GB
"""Between two GPUs of a machine: an assumption."""
NETWORK_BYTES_PER_S = 25 * GBIT
"""Between the two machines of a cluster: an assumption."""


@dataclass(frozen=True, kw_only=True)
class PoplarCluster:
    """A cluster of Table 1: a machine of each of two types of GPU."""

    name: str
    strong: str
    weak: str
    num_strong: int
    num_weak: int
    models: tuple[str, ...]
    sequence_length: int
    dtype: str
    times: Literal["measured", "catalogue"]
    """Where layer times are from: Zorse's authors, or the peaks of the device catalogue."""
    network_bytes_per_s: float = NETWORK_BYTES_PER_S
    tokens_per_step: int = TOKENS_PER_STEP

    def with_numbers(self, num_strong: int, num_weak: int) -> PoplarCluster:
        """The cluster with other numbers of GPUs; 0 leaves a machine out."""
        return replace(self, num_strong=num_strong, num_weak=num_weak)

    @property
    def num_rows(self) -> int:
        """Rows of a step."""
        return self.tokens_per_step // self.sequence_length

    @property
    def cluster(self) -> Cluster:
        """The strong machine first."""
        network = Link(self.network_bytes_per_s)
        counts = [(self.strong, self.num_strong), (self.weak, self.num_weak)]
        nodes = [
            Node(
                name=device.lower(),
                devices=(device,) * number,
                fabric=Link(PCIE_BYTES_PER_S) if number > 1 else None,
                nic=network,
            )
            for device, number in counts
            if number
        ]
        return make_cluster(self.name, nodes, nic=self.network_bytes_per_s)

    def describe(self) -> str:
        """`4 A100-80 + 4 A100-40`."""
        counts = [(self.num_strong, self.strong), (self.num_weak, self.weak)]
        return " + ".join(f"{number} {device}" for number, device in counts if number)


_TABLES: Mapping[str, Any] = tomllib.loads((Path(__file__).parent / "paper.toml").read_text(encoding="utf-8"))
CLUSTERS = tuple(read_dataclass(PoplarCluster, own) for own in _TABLES["clusters"])
"""Table 1."""
NUMBERS = tuple((strong, weak) for strong, weak in _TABLES["numbers"])
"""Strong and weak GPUs of Fig. 5."""
SPEEDUP_RANGE: tuple[float, float] = tuple(_TABLES["speedup_range"])
LLAMA_OVER: Mapping[str, float] = _TABLES["llama_over"]
ASSUMPTIONS: tuple[str, ...] = tuple(_TABLES["assumptions"])

MODELS = {"0.5b": ("tiny", 6), "tiny": ("tiny", None), "7b": ("7b", None)}
"""A model of the paper by one that Zorse's authors measured, and how many of its layers; None: all."""
STAND_INS = {"A100-80": "A100-40"}
"""Whose layer times stand for a device's where only the other was measured: the two compute equally fast
(the paper: "equal compute capabilities")."""


ORDER = "1f1b"
"""A microbatch's backward right after its forward, as where gradients are accumulated."""
LONG = 4.0
"""Computing so many times longer than collectives hides what of them can be hidden."""


class RoundTimes(NamedTuple):
    """Seconds of the collectives of one round of microbatches."""

    alone: float
    """Beside nothing else."""
    exposed: float
    """What they add to a long computation."""
    hidden: float
    """What of them runs beside it."""


def deal_rounds(sizes: Sequence[Sequence[int]]) -> tuple[Microbatch, ...]:
    """Microbatches of these rows for ranks 0, 1, ...: the first of each, then the second of each."""
    return deal_rows((turn, rank, size) for rank, own in enumerate(sizes) for turn, size in enumerate(own))


@dataclass(frozen=True)
class Job:
    """A model on a cluster at one ZeRO stage."""

    workload: Workload
    cluster: Cluster
    profile: Profile
    num_rows: int
    """Rows of a step."""
    zero: int

    @property
    def has_rounds(self) -> bool:
        """Whether collectives come with each microbatch."""
        return self.zero >= 2

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Device type of each rank."""
        return tuple(self.cluster.device_type(place) for place in self.cluster.places)

    @cached_property
    def clock(self) -> LayerTimeModel:
        return LayerTimeModel(self.profile, self.workload)

    @cached_property
    def setting(self) -> SimulationInputs:
        return SimulationInputs(workload=self.workload, cluster=self.cluster, profile=self.profile)

    @cached_property
    def cards(self) -> tuple[RankCosts, ...]:
        """Costs of all ranks; those of one type have the same table."""
        most = self._find_max_rows()
        tables = {
            device: tuple(self._time_microbatch(device, rows) for rows in range(1, number + 1))
            for device, number in most.items()
        }
        return tuple(RankCosts(rank, tables[device]) for rank, device in enumerate(self.devices))

    @cached_property
    def round_s(self) -> RoundTimes:
        """Times of one round's collectives, found by simulating rounds in which nothing is computed, and
        rounds in which computing takes longer than they do."""
        alone_s = self._simulate_round(0.0)
        long_s = LONG * alone_s
        exposed_s = max(0.0, self._simulate_round(long_s) - long_s)
        return RoundTimes(alone_s, exposed_s, max(0.0, alone_s - exposed_s))

    def lay_plan(self, microbatches: Sequence[Microbatch]) -> Plan:
        """All layers on one group of all devices."""
        group = Group(
            ranks=tuple(range(len(self.devices))),
            microbatches=tuple(microbatches),
            zero=self.zero,
            grad_reduce="microbatch" if self.has_rounds else "once",
        )
        modules = tuple(name for name, _ in self.workload.layers)
        num_rows = sum(each.num_rows for each in microbatches)
        return Plan(num_rows, (group,), (Ministage(0, modules),), model=self.workload.model)

    def simulate(self, microbatches: Sequence[Microbatch]) -> SimulatedPlan:
        """A step."""
        return self.setting.simulate(self.lay_plan(microbatches).validate(), schedule=ORDER)

    def tflops(self, case: SimulatedPlan) -> float:
        """Throughput of all devices together."""
        return self.workload.flops_per_row() * self.num_rows / case.simulation.iteration_s / 1e12

    # -- parts -----------------------------------------------------------------------------

    def _time_microbatch(self, device: str, rows: float) -> float:
        """Forward and backward of a microbatch through the whole model."""
        layers = Counter(kind for _, kind in self.workload.layers)
        return sum(
            number
            * (
                self.clock.forward_s(kind, device, int(rows), "none")
                + self.clock.backward_s(kind, device, int(rows), "none")
            )
            for kind, number in layers.items()
        )

    def _find_max_rows(self) -> dict[str, int]:
        """Rows that fit at once while microbatches of so many follow each other, by device type."""
        plan = self.lay_plan(deal_rounds([(1, 1)] * len(self.devices)))
        actions = self.setting.list_actions(plan, ORDER)
        costs = self.setting.find_costs(plan)
        sizes = measure_ministages(plan, self.workload)

        def peak_bytes(rank: int, rows: int) -> int:
            own = self.lay_plan(deal_rounds([(rows, rows)] * len(self.devices)))
            context_bytes = costs.context_bytes[rank]
            return walk_memory(
                own, rank, actions[rank], sizes[rank], context_bytes=context_bytes, on_gpu=True
            ).device_peak_bytes

        return {
            device: bisect_right(
                range(1, self.num_rows + 1), costs.memory_bytes[rank], key=partial(peak_bytes, rank)
            )
            for rank, device in enumerate(self.devices)
            if rank == self.devices.index(device)
        }

    def _simulate_round(self, compute_s: float) -> float:
        """Seconds of a round in which every card computes so long, a third of it forward."""
        steps_s = []
        for number in (1, 2):
            plan = self.lay_plan(deal_rounds([(1,) * number] * len(self.devices)))
            costs = self.setting.find_costs(plan)
            timed = replace(
                costs,
                forward_s=dict.fromkeys(costs.forward_s, compute_s / 3),
                backward_s=dict.fromkeys(costs.backward_s, 2 * compute_s / 3),
            )
            steps_s.append(simulate(plan, self.setting.list_actions(plan, ORDER), timed).iteration_s)
        return max(0.0, steps_s[1] - steps_s[0])


def make_job(folder: Path, paper: PoplarCluster, model: str, zero: int) -> Job:
    """A cell of the paper's figures.

    Args:
        folder: with the files of Zorse's authors.
        model: of `MODELS`.

    Raises:
        ProfileError: The files lack the model, or its times at that length and dtype.
    """
    measured, num_layers = MODELS[model]
    length, dtype = paper.sequence_length, paper.dtype
    whole = read_workload(folder, measured, length, dtype=dtype)
    kept = set([name for name, kind in whole.layers if kind == "layer"][:num_layers])
    layers = tuple(own for own in whole.layers if own[1] != "layer" or own[0] in kept)
    overheads = Overheads(context_bytes=CONTEXT_BYTES, source=Source("given", note="assumed"))
    profile = Profile(model=spell_model(model), overheads=overheads)
    if paper.times == "measured":
        found = read_profile(folder, measured, length, dtype=dtype).layers
        known = {times.device for times in found}
        stand_ins = tuple(
            replace(times, device=device, source=Source("given", note=f"as on the {other}"))
            for device, other in STAND_INS.items()
            for times in found
            if times.device == other and device not in known
        )
        profile = replace(profile, layers=found + stand_ins)
    return Job(
        workload=replace(whole, layers=layers, model=spell_model(model)),
        cluster=paper.cluster,
        profile=profile,
        num_rows=paper.num_rows,
        zero=zero,
    )
