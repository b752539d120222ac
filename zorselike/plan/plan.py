"""The plan: who computes what. The only contract between planner and runtime.

A plan is plain data, immutable and free of torch. `zorselike/plan/toml.py` reads and writes
it, `zorselike/plan/validate.py` proves it consistent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

Replica = int | tuple[int, ...]
"""One rank, or (once tensor parallelism exists) the ranks that hold one copy together."""

GradReduce = Literal["once", "microbatch"]
Recompute = Literal["none", "layer"]

PLAN_VERSION = 1
OFFLOAD_KINDS = ("params", "optimizer", "activations")
OFFLOAD_IN_FLIGHT = ("optimizer",)
"""Of these, what a plan that bounds microbatches in flight may offload."""


@dataclass(frozen=True, order=True)
class Microbatch:
    """Rows `[start, stop)` of the global batch that `rank` computes at once."""

    rank: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Group:
    """Ranks that share ministages and do data parallelism among themselves.

    `microbatches` are in processing order; those of one rank, in that order, are its
    microbatches 0, 1, 2, ... A rank of `ranks` without any holds shards only.
    """

    ranks: tuple[Replica, ...]
    microbatches: tuple[Microbatch, ...]
    zero: int = 2
    grad_reduce: GradReduce = "once"
    offload: tuple[str, ...] = ()
    recompute: Recompute = "none"
    max_in_flight: int | None = None
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

    @cached_property
    def microbatches_by_rank(self) -> dict[int, tuple[Microbatch, ...]]:
        """Each rank's own microbatches in its processing order; `()` for a rank without rows."""
        by_rank: dict[int, list[Microbatch]] = {rank: [] for rank in self.flat_ranks}
        for microbatch in self.microbatches:
            by_rank.setdefault(microbatch.rank, []).append(microbatch)
        return {rank: tuple(own) for rank, own in by_rank.items()}

    @property
    def max_microbatches(self) -> int:
        """The largest number of microbatches of any rank (`max M` of the design)."""
        return max((len(own) for own in self.microbatches_by_rank.values()), default=0)


@dataclass(frozen=True)
class Ministage:
    """Consecutive layers, owned by one group; `modules` are global module names in model order."""

    group: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Device:
    """The process that a rank of the plan means, whatever order the nodes come up in."""

    rank: int
    node: str
    local_rank: int
    type: str = ""


@dataclass(frozen=True)
class Estimates:
    """What the planner promised, so that a run can be held against it."""

    iteration_s: float | None = None
    peak_memory_bytes: tuple[int, ...] = ()
    cost_per_iteration: float | None = None
    share_of_ideal: float | None = None
    """Of what its devices would do if all computed all the time, nothing recomputed."""
    limited_by: tuple[str, ...] = ()
    """Why that share is no larger, a sentence each."""


@dataclass(frozen=True)
class Plan:
    """Groups of ranks, ministages of layers, and the rows that every rank computes."""

    global_batch: int
    groups: tuple[Group, ...]
    ministages: tuple[Ministage, ...]
    devices: tuple[Device, ...] = ()
    sequence_length: int | None = None
    model: str | None = None
    cluster_fingerprint: str | None = None
    workload_fingerprint: str | None = None
    estimates: Estimates = Estimates()
    version: int = PLAN_VERSION

    @property
    def num_ranks(self) -> int:
        return sum(len(group.flat_ranks) for group in self.groups)

    @property
    def num_ministages(self) -> int:
        return len(self.ministages)

    @cached_property
    def group_of_rank(self) -> dict[int, int]:
        """Index of the group that each rank belongs to."""
        return {rank: g for g, group in enumerate(self.groups) for rank in group.flat_ranks}

    @property
    def bounds_in_flight(self) -> bool:
        """Whether any group says how many microbatches may be in flight."""
        return any(group.max_in_flight is not None for group in self.groups)

    def group_of(self, ministage: int) -> Group:
        """The group that owns a ministage."""
        return self.groups[self.ministages[ministage].group]

    def ministages_of_group(self, group: int) -> tuple[int, ...]:
        """The ministages of a group in model order."""
        return tuple(i for i, ministage in enumerate(self.ministages) if ministage.group == group)

    def ministages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The ministages that a rank takes part in, in model order."""
        return self.ministages_of_group(self.group_of_rank[rank])

    def microbatches_of_rank(self, rank: int) -> tuple[Microbatch, ...]:
        """The rank's own microbatches in processing order, `()` if it has no rows."""
        return self.groups[self.group_of_rank[rank]].microbatches_by_rank[rank]

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads and validates a plan file; raises `PlanError` naming file, key and mend."""
        from zorselike.plan.toml import load_plan

        return load_plan(path)

    def save(self, path: str | Path) -> None:
        """Writes the plan as TOML that `Plan.load` reads back equal."""
        from zorselike.plan.toml import save_plan

        save_plan(self, path)

    def validate(self) -> Plan:
        """Returns the plan itself if it is consistent; raises `PlanError` otherwise."""
        from zorselike.plan.validate import validate_plan

        validate_plan(self)
        return self

    def explain(self) -> str:
        """A readable table of groups, rows per rank and ministages."""
        from zorselike.plan.explain import explain_plan

        return explain_plan(self)

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits that change with anything that changes what is computed where."""
        from zorselike.plan.toml import fingerprint

        return fingerprint(self)
