"""What a plan is made of: groups of ranks with their microbatches, ministages, devices, estimates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from zorselike.text.annotations import Must, Natural, OneOf, Positive, Quantity

Replica = Natural | Annotated[tuple[Natural, ...], Must(bool, "give the replica a rank or remove it")]
"""One rank, or (once tensor parallelism exists) the ranks that hold one copy together."""

GradReduce = Literal["once", "microbatch"]
Recompute = Literal["none", "layer"]

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


@dataclass(frozen=True)
class Group:
    """Ranks that share ministages and do data parallelism among themselves.

    `microbatches` are in processing order; those of one rank, in that order, are its
    microbatches 0, 1, 2, ... A rank of `ranks` without any holds shards only.
    """

    ranks: Annotated[tuple[Replica, ...], Must(bool, "give the group a rank or remove it")]
    microbatches: tuple[Microbatch, ...]
    zero: Annotated[int, OneOf((0, 1, 2, 3))] = 2
    grad_reduce: GradReduce = "once"
    overlap_grad_reduce: bool = True
    """Whether on GPUs a ministage's reduction runs beside what follows it, where there is such a thing
    (`schedule/contract.py`). Then its whole gradients are held until the next reduction; else the device
    waits for the reduction, and they go with it."""
    offload: tuple[Annotated[str, OneOf(OFFLOAD_KINDS)], ...] = ()
    recompute: Recompute = "none"
    max_in_flight: Positive | None = None
    """The most microbatches of a rank whose activations are held at once, between forward and backward.
    Where any group of a plan says so, all its groups go backward before forward as soon as they can
    (`zorselike/schedule/orders/in_flight.py`); None beside such a group is that order without a bound."""

    @property
    def flat_ranks(self) -> tuple[int, ...]:
        """All ranks, those of tensor-parallel replicas included."""
        return tuple(r for entry in self.ranks for r in ((entry,) if isinstance(entry, int) else entry))

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
        """Microbatches of each rank in its processing order; `()` for a rank without rows."""
        by_rank: dict[int, list[Microbatch]] = {rank: [] for rank in self.flat_ranks}
        for microbatch in self.microbatches:
            by_rank.setdefault(microbatch.rank, []).append(microbatch)
        return {rank: tuple(microbatches) for rank, microbatches in by_rank.items()}

    @property
    def max_microbatches(self) -> int:
        """The largest number of microbatches of any rank (`max M` of the design)."""
        return max(map(len, self.microbatches_by_rank.values()), default=0)


@dataclass(frozen=True)
class Ministage:
    """Consecutive layers, owned by one group; `modules` are global module names in model order."""

    group: Natural
    modules: Annotated[tuple[str, ...], Must(bool, "give it a module or remove the ministage")]


@dataclass(frozen=True)
class Device:
    """The process that a rank of the plan means, whatever order the nodes come up in."""

    rank: Natural
    node: Annotated[str, Must(bool, "give the hostname")]
    local_rank: Natural
    type: str = ""


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
