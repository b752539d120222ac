"""What a plan is made of: groups of ranks with their microbatches, ministages, devices, estimates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from zorselike.text.annotations import Label, Must, Natural, OneOf, Positive, Quantity

RanksEntry = Natural | Annotated[tuple[Natural, ...], Must(bool, "give the replica a rank or remove it")]
"""One rank, or the ranks of a tensor-parallel replica."""

GradReduce = Literal["once", "microbatch"]
Recompute = Literal["none", "layer"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "layer")

OFFLOAD_KINDS = ("params", "optimizer", "activations")
OFFLOAD_IN_FLIGHT = ("optimizer",)
"""Of these, what a plan that bounds microbatches in flight may offload."""


def may_overlap_reduction(zero: int, num_ranks: int) -> bool:
    """Whether a ministage's reduction could run beside what follows it. ZeRO 3 reduces inside its backwards,
    and a rank alone has nobody to wait for."""
    return zero != 3 and num_ranks > 1


@dataclass(frozen=True, order=True)
class Microbatch:
    """Rows `[start, stop)` of the global batch that `rank` computes at once."""

    rank: Natural
    start: Natural
    stop: Natural

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class Replica(NamedTuple):
    """The ranks that compute the same microbatches, each its part: one rank, or several by tensor and
    sequence parallelism. A rank's place among them says which part."""

    ranks: tuple[int, ...]

    @property
    def first(self) -> int:
        """The rank that the replica's microbatches are booked under."""
        return self.ranks[0]

    @property
    def degree(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Group:
    """Replicas that share ministages and do data parallelism among themselves.

    `microbatches` are in processing order; those of one rank, in that order, are its
    microbatches 0, 1, 2, ... A rank of `ranks` without any holds shards only. An entry of `ranks` that is a
    tuple is a tensor-parallel replica: its microbatches are its first rank's and all of its ranks execute
    them.
    """

    ranks: Annotated[tuple[RanksEntry, ...], Must(bool, "give the group a rank or remove it")]
    microbatches: tuple[Microbatch, ...]
    zero: Annotated[int, OneOf((0, 1, 2, 3))] = 2
    grad_reduce: GradReduce = "once"
    """When gradients are reduced, with ZeRO 2: at the end of a step, or after every microbatch. ZeRO 0 and 1
    do the first; ZeRO 3 does the second, whatever stands here."""
    overlap_grad_reduce: bool = True
    """Whether on GPUs a ministage's reduction runs beside what follows it, where there is such a thing
    (`schedule/contract.py`). Then its whole gradients are held until the next reduction; else the device
    waits for the reduction, and they go with it."""
    offload: tuple[Annotated[str, OneOf(OFFLOAD_KINDS)], ...] = ()
    recompute: Recompute = "none"
    max_in_flight: Positive | None = None
    """The most microbatches of a rank, of all its ministages, whose activations are held at once, between
    forward and backward.
    Where any group of a plan says so, all its groups go backward before forward as soon as they can
    (`zorselike/schedule/orders/in_flight.py`); None beside such a group is that order without a bound."""

    @cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """All replicas, single ranks included, in the plan's order."""
        return tuple(Replica((entry,) if isinstance(entry, int) else tuple(entry)) for entry in self.ranks)

    @cached_property
    def flat_ranks(self) -> tuple[int, ...]:
        """All ranks, those of tensor-parallel replicas included."""
        return tuple(rank for replica in self.replicas for rank in replica.ranks)

    @cached_property
    def degree(self) -> int:
        """The largest tensor-parallel degree of its replicas, and the number of pieces that a cut weight
        has; 1 without tensor parallelism."""
        return max(replica.degree for replica in self.replicas)

    def replica_of(self, rank: int) -> Replica:
        """The replica that a rank of the group belongs to."""
        return self._replica_by_rank[rank]

    @cached_property
    def _replica_by_rank(self) -> dict[int, Replica]:
        return {rank: replica for replica in self.replicas for rank in replica.ranks}

    @property
    def reduces_per_microbatch(self) -> bool:
        """Whether gradients are reduced after every microbatch (always with ZeRO 3)."""
        return self.zero == 3 or self.grad_reduce == "microbatch"

    @property
    def waits_for_reductions(self) -> bool:
        """Whether the plan says that nothing runs beside a reduction, where on a GPU something could."""
        may_overlap = may_overlap_reduction(self.zero, len(self.flat_ranks))
        return may_overlap and not self.overlap_grad_reduce

    @cached_property
    def microbatches_by_rank(self) -> dict[int, tuple[Microbatch, ...]]:
        """Microbatches that each rank executes in its processing order, all ranks of a replica those of its
        first; `()` for a rank without rows."""
        by_first: dict[int, list[Microbatch]] = {replica.first: [] for replica in self.replicas}
        for microbatch in self.microbatches:
            by_first.setdefault(microbatch.rank, []).append(microbatch)
        booked = {rank: tuple(microbatches) for rank, microbatches in by_first.items()}
        executed = {rank: booked[replica.first] for replica in self.replicas for rank in replica.ranks}
        return {**booked, **executed} if len(executed) < len(booked) else executed

    @property
    def max_microbatches(self) -> int:
        """The largest number of microbatches of any rank (`max M` of the design)."""
        return max(map(len, self.microbatches_by_rank.values()), default=0)

    @property
    def has_uneven_counts(self) -> bool:
        """Whether its ranks have different numbers of microbatches."""
        return len({*map(len, self.microbatches_by_rank.values())}) > 1


@dataclass(frozen=True)
class Ministage:
    """Consecutive layers, owned by one group; `modules` are global module names in model order."""

    group: Natural
    modules: Annotated[tuple[str, ...], Must(bool, "give it a module or remove the ministage")]


@dataclass(frozen=True)
class Device:
    """The process that a rank of the plan means, whatever order the nodes come up in."""

    rank: Natural
    node: Annotated[Label, Must(bool, "give the hostname")]
    local_rank: Natural
    type: Label = ""


@dataclass(frozen=True)
class Estimates:
    """What the planner promised, so that a run can be held against it."""

    iteration_s: Quantity | None = None
    cost_per_iteration: Quantity | None = None
    share_of_ideal: Quantity | None = None
    """Speed as a share of what the devices would reach if all computed all the time, nothing recomputed."""
    limited_by: tuple[str, ...] = ()
    """Why that share is no larger, a sentence each."""
    peak_memory_bytes: tuple[Natural, ...] = ()
    """Peak of each rank."""
