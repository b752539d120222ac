"""What one plan's actions cost on one cluster, in numbers: all that the simulator reads.

`zorselike/cost/assemble.py` makes it of plan, workload, cluster and profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zorselike.cost.network import Network
from zorselike.cost.sizes import MinistageBytes
from zorselike.plan.cluster.cluster import Place


@dataclass(frozen=True)
class UnitBytes:
    """One FSDP unit of a ministage, whole."""

    gathered_bytes: int
    """What an all-gather gives, in the compute dtype."""
    reduced_bytes: int
    """What a reduction takes: fp32 with master weights, else the compute dtype; 0 where frozen."""
    is_cut: bool = False
    """Whether tensor parallelism cuts it into pieces, each shared by a rank of every replica."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds and bytes of everything that a plan's schedule does, by rank of the plan."""

    places: tuple[Place, ...]
    """Of each rank."""
    network: Network
    forward_s: Mapping[tuple[int, int, int], float]
    """By rank, ministage, rows of the microbatch; the loss is in that of the last ministage, and collectives
    inside a tensor-parallel replica in all."""
    backward_s: Mapping[tuple[int, int, int], float]
    """Recomputation included where the group recomputes."""
    update_s: Mapping[tuple[int, int], float]
    """By rank and ministage: one `STEP` over this rank's shards."""
    row_bytes: tuple[int, ...]
    """Of a row that enters each ministage, and of its gradient; the first is 0."""
    units: tuple[tuple[UnitBytes, ...], ...]
    """Of each ministage, in the order in which they are gathered."""
    sizes: tuple[Mapping[int, MinistageBytes], ...]
    """For each rank: of each of its ministages."""
    tie_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Of the weights that ministages (owner, borrower) share, in the compute dtype."""
    tie_gradient_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Of their reduced gradients, fp32 with master weights; what is missing is as large as the weight."""
    host_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the host's thread per `Kind` of action, beside what the action computes."""
    unit_host_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """By `Kind` and ministage: seconds more for its FSDP units; a `NORM` takes those of the rank's own."""
    step_host_s: float = 0.0
    """Of a step, beside all actions."""
    is_cpu: tuple[bool, ...] = ()
    """Ranks whose thread computes by itself; else it only starts what the device does. Empty: none."""
    overlap_slowdown: float = 1.0
    """How much longer a computation takes while communication of its rank runs beside it."""
    gradient_row_bytes: tuple[int, ...] = ()
    """As `row_bytes`, of the gradients that go back over each boundary; empty: as many."""
    eager_bytes: float = 0.0
    """Transfers of so many bytes and fewer do not wait for their receive to be posted, nor hold up their
    sender until then: what a transport buffers. 0: none, as Gloo, whatever the size."""
    transfers_block: bool = False
    """Whether a transfer keeps both its ranks from computing, from the later of both posts until its bytes
    have moved, at its place in the lists (DeepSpeed's pipeline); else it runs beside computation."""
    context_bytes: tuple[int, ...] = ()
    """Memory of each rank's device that tensors do not have; empty: 0."""
    communicator_bytes: int = 0
    """Memory of a GPU that each communicator of its rank takes."""
    memory_corrections: tuple[str, ...] = ()
    """What of it the largest batches that were found ask for, a line for each type of device."""
    allocator_share: float = 0.0
    """Of tensors' bytes, what the allocator adds."""
    memory_bytes: tuple[int, ...] = ()
    """Of each rank's device; empty: not known."""
    price_per_hour: float = 0.0
    """Of all nodes that hold a rank."""
    egress_price_per_gb: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """By nodes from and to, where it is not free."""
    currency: str = "USD"
    assumptions: tuple[str, ...] = ()
    """What was not measured and is put in its place, one line each."""
