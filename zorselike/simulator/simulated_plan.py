"""A plan simulated on a cluster, with everything that reports and drawings need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from zorselike.cost.catalogue import CPU
from zorselike.cost.step_costs import StepCosts
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.plan.workload import Workload
from zorselike.schedule.actions import Action
from zorselike.schedule.orders import DEFAULT_ORDER
from zorselike.simulator.mirrors import host_copies, list_states
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
    schedule: str = DEFAULT_ORDER
    is_mirrored: bool = False
    """As `SimulationInputs.is_mirrored`."""

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
    def offloaded_bytes(self) -> dict[int, int]:
        """Bytes offloaded to host memory, by node; nodes without any are left out."""
        return self._add_by_node([walk.host_peak_bytes for walk in self.simulation.memory])

    @cached_property
    def mirror_bytes(self) -> dict[int, int]:
        """Bytes of copies and mirrors of the state in host memory, by node; empty where nothing is
        mirrored."""
        if not self.is_mirrored:
            return {}
        nodes = [place.node for place in self.costs.places]
        return self._add_by_node(host_copies(list_states(self.plan, self.workload), nodes))

    @cached_property
    def host_bytes(self) -> dict[int, int]:
        """Bytes of host memory that are asked for, by node; nodes without any are left out. Where state is
        mirrored, what CPU ranks compute with counts too."""
        found = Counter(self.offloaded_bytes) + Counter(self.mirror_bytes)
        for rank, place in enumerate(self.costs.places) if self.is_mirrored else ():
            found[place.node] += self.peak_bytes[rank] if self.device_types[rank] == CPU else 0
        return dict(found)

    def _add_by_node(self, by_rank: Sequence[int]) -> dict[int, int]:
        found: Counter[int] = Counter()
        for place, num_bytes in zip(self.costs.places, by_rank, strict=True):
            found[place.node] += num_bytes
        return dict(+found)

    def is_host_overfull(self, node: int) -> bool:
        """Whether more is asked of a node's memory than it has, if that is known."""
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
