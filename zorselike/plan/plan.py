"""The plan: who computes what. The only contract between planner and runtime.

A plan is plain data, immutable and free of torch. `zorselike/plan/toml.py` reads and writes it,
`zorselike/plan/validate.py` proves it consistent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any

from zorselike.errors import PlanError
from zorselike.plan.explain import explain_plan
from zorselike.plan.parts import (
    OFFLOAD_IN_FLIGHT,
    OFFLOAD_KINDS,
    RECOMPUTE,
    Device,
    Estimates,
    GradReduce,
    Group,
    Microbatch,
    Ministage,
    Recompute,
    Replica,
)
from zorselike.plan.toml import fingerprint_plan, format_plan, read_group, read_ministage
from zorselike.plan.validate import validate_plan
from zorselike.text.annotations import Must, Positive
from zorselike.text.dataclass_tables import read_dataclass
from zorselike.text.document import Document

__all__ = [
    "OFFLOAD_IN_FLIGHT",
    "OFFLOAD_KINDS",
    "RECOMPUTE",
    "Device",
    "Estimates",
    "GradReduce",
    "Group",
    "Microbatch",
    "Ministage",
    "Plan",
    "Recompute",
    "Replica",
]


@dataclass(frozen=True)
class Plan(Document):
    """Groups of ranks, ministages of layers, and the rows that every rank computes.

    `Plan.load(path)` and `plan.save(path)` read and write TOML; what is wrong is a `PlanError`.
    """

    noun = "plan"
    error = PlanError

    global_batch: Positive
    groups: Annotated[tuple[Group, ...], Must(bool, "a plan needs at least one [[groups]]")]
    ministages: Annotated[tuple[Ministage, ...], Must(bool, "a plan needs at least one [[ministages]]")]
    devices: tuple[Device, ...] = ()
    sequence_length: Positive | None = None
    model: str | None = None
    cluster_fingerprint: str | None = None
    workload_fingerprint: str | None = None
    estimates: Estimates = field(default_factory=Estimates)

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

    @cached_property
    def ministage_of(self) -> dict[str, int]:
        """Index of the ministage that each module is in, by its name, in model order."""
        return {name: s for s, ministage in enumerate(self.ministages) for name in ministage.modules}

    @cached_property
    def has_replicas(self) -> bool:
        """Whether any replica has several ranks."""
        return any(group.degree > 1 for group in self.groups)

    def replica_of(self, rank: int) -> Replica:
        """The replica that a rank belongs to."""
        return self.groups[self.group_of_rank[rank]].replica_of(rank)

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
        """Microbatches that a rank executes in processing order, those of its replica; `()` if it has no
        rows."""
        return self.groups[self.group_of_rank[rank]].microbatches_by_rank[rank]

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Plan:
        return read_dataclass(
            cls, table, readers={Group: partial(read_group, plan=table), Ministage: read_ministage}
        )

    def to_text(self) -> str:
        return format_plan(self)

    def validate(self) -> Plan:
        """Returns the plan itself if it is consistent; raises `PlanError` otherwise."""
        validate_plan(self)
        return self

    def explain(self) -> str:
        """A readable table of groups, rows per rank and ministages; raises `PlanError` as `validate` does."""
        return explain_plan(self.validate())

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits that change with anything that changes what is computed where.

        Neither where the plan came from (fingerprints, estimates) nor how it is written (the order of
        devices or of offload kinds, `grad_reduce` beside ZeRO 3, `overlap_grad_reduce` there and of a rank
        alone) makes a difference.
        """
        return fingerprint_plan(self)
