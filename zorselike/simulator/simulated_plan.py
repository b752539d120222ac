"""A plan simulated on a cluster, with everything that reports and drawings need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from zorselike.cost.step_costs import StepCosts
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.plan.workload import Workload
from zorselike.schedule.actions import Action
from zorselike.simulator.result import Simulation


@dataclass(frozen=True, kw_only=True)
class SimulatedPlan:
    """A plan on a cluster: its actions, their costs, and the simulated step."""

    plan: Plan
    workload: Workload
    cluster: Cluster
    actions: Mapping[int, Sequence[Action]]
    costs: StepCosts
    simulation: Simulation
    schedule: str = "ours"

    @cached_property
    def device_types(self) -> tuple[str, ...]:
        """Device type of each rank."""
        return tuple(self.cluster.device_type(place) for place in self.costs.places)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak memory of each rank's device."""
        return self.simulation.peak_bytes

    @property
    def tokens_per_s(self) -> float:
        tokens = self.plan.global_batch * self.workload.sequence_length
        return tokens / self.simulation.iteration_s

    def limit_bytes(self, rank: int) -> int | None:
        """Memory of the rank's device, if known."""
        return self.costs.memory_bytes[rank] if self.costs.memory_bytes else None

    def is_overfull(self, rank: int) -> bool:
        """Whether a rank needs more memory than its device has."""
        limit = self.limit_bytes(rank)
        return limit is not None and self.peak_bytes[rank] > limit

    @cached_property
    def host_bytes(self) -> dict[int, int]:
        """Bytes offloaded to host memory, by node; nodes without any are left out."""
        found: dict[int, int] = {}
        for place, walk in zip(self.costs.places, self.simulation.memory, strict=True):
            if walk.host_peak_bytes:
                found[place.node] = found.get(place.node, 0) + walk.host_peak_bytes
        return found

    def is_host_overfull(self, node: int) -> bool:
        """Whether more is offloaded to a node than its memory, if that is known."""
        limit = self.cluster.nodes[node].host_memory_bytes
        return limit is not None and self.host_bytes.get(node, 0) > limit

    @cached_property
    def fits(self) -> bool:
        """Whether no rank and no host needs more memory than it has, by the walk over every rank's list."""
        ranks = range(self.plan.num_ranks)
        return not any(map(self.is_overfull, ranks)) and not any(map(self.is_host_overfull, self.host_bytes))

    def describe_rank(self, rank: int) -> str:
        """`rank 3 (T4 of node b)`."""
        node = self.cluster.nodes[self.costs.places[rank].node].name
        return f"rank {rank} ({self.device_types[rank]} of node {node})"


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A plan that another system would run on the same devices."""

    name: str
    how: str
    """Devices, ZeRO stage, microbatches."""
    simulated: SimulatedPlan | None
    """None where nothing fits."""
    reason: str = ""
    """Why nothing fits."""
