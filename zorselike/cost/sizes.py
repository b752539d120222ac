"""How large the parts of ministages are on each rank, from a plan and the counts of its layers.

What FSDP2 adds when it pads dimension 0 of each parameter to a multiple of the group is not counted, since
a workload knows numbers of parameters and not their shapes: less than one row of a parameter a rank.
For the same reason tensor parallelism is taken to cut all weights of a layer (its norms are no thousandth of
them) and none of other modules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from zorselike.cost.parameter_bytes import ParameterBytes, count_shards, largest_shard
from zorselike.plan.plan import Plan, Recompute
from zorselike.plan.workload import LayerKind, Workload


@dataclass(frozen=True, kw_only=True)
class MinistageBytes:
    """Sizes of one ministage on one rank, in bytes."""

    gathered_bytes: int
    """All parameters that the rank computes with, whole, in the compute dtype."""
    shard_bytes: int
    """This rank's shards, in the compute dtype."""
    kept_shard_bytes: int = 0
    """Of these what never leaves the device: tied weights."""
    gradient_bytes: int
    """Gradients of the trainable parameters, whole, as they are added up: fp32 where the ministage
    computes in half precision, else the parameters' dtype."""
    gradient_shard_bytes: int
    """This rank's reduced gradients: fp32 with master weights, else the parameters' dtype."""
    state_bytes: int
    """This rank's optimizer state, fp32 master weights included."""
    masters: bool = False
    """Whether updates change master weights and overwrite the shards."""
    activation_bytes_per_row: int = 0
    """What stays of a row between its forward and its backward, the ministage's input included: with
    recomputation the inputs of layers, else all that autograd saves."""
    working_bytes_per_row: int = 0
    """What else a row needs while it computes: a layer's internals."""
    boundary_bytes_per_row: int = 0
    """A row of what enters or leaves the ministage, whichever is larger."""
    largest_unit_bytes: int = 0
    """Parameters of the largest FSDP unit, whole, in the compute dtype."""
    largest_unit_gradient_bytes: int = 0
    """Their gradients, as they are added up."""

    @property
    def rounded_gradient_shard_bytes(self) -> int:
        """This rank's reduced gradients in the compute dtype."""
        return self._rounded(self.gradient_shard_bytes)

    @property
    def largest_unit_rounded_gradient_bytes(self) -> int:
        """Gradients of the largest FSDP unit as a backward makes them, in the compute dtype."""
        return self._rounded(self.largest_unit_gradient_bytes)

    def _rounded(self, num_bytes: int) -> int:
        """Bytes of gradients in the compute dtype: half of what they take in fp32 with masters."""
        return num_bytes // 2 if self.masters else num_bytes


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """Parameters of one FSDP unit, as counts."""

    num_parameters: int
    num_trainable: int
    num_borrowed: int = 0
    """Of the trainable: copies of another ministage's weights, which this one does not update."""
    num_tied: int = 0
    """Of the parameters: borrowed or lent, which never leave the device."""
    is_cut: bool = False
    """Whether tensor parallelism cuts it into pieces, as it does layers."""

    @property
    def num_updated(self) -> int:
        return self.num_trainable - self.num_borrowed

    def __add__(self, other: UnitSize) -> UnitSize:
        """Of modules that share a weight, which is not cut."""
        added = {name: number + getattr(other, name) for name, number in vars(self).items()}
        return UnitSize(**added | {"is_cut": False})


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Activations of one row of one ministage."""

    activation_bytes: int = 0
    working_bytes: int = 0
    boundary_bytes: int = 0


def add_up(
    units: Sequence[UnitSize],
    rows: RowBytes,
    each: ParameterBytes,
    *,
    num_shards: int = 1,
    degree: int = 1,
    num_replicas: int | None = None,
) -> MinistageBytes:
    """The sizes of a ministage of these units on one rank, whose parameters so many ranks share.

    Of what tensor parallelism cuts, the rank has a `degree`-th, and shares that with a rank each of the other
    replicas; `num_replicas` is how many share it, as many as `num_shards` if None.
    """
    num_cut_shards = degree * (num_shards if num_replicas is None else num_replicas)

    def shard(unit: UnitSize, number: int) -> int:
        return largest_shard(number, num_cut_shards if unit.is_cut else num_shards)

    def own(unit: UnitSize, number: int) -> int:
        return largest_shard(number, degree if unit.is_cut else 1)

    whole = [own(unit, unit.num_parameters) * each.weight for unit in units]
    gradients = [own(unit, unit.num_trainable) * each.gradient for unit in units]
    return MinistageBytes(
        gathered_bytes=sum(whole),
        shard_bytes=each.weight * sum(shard(unit, unit.num_parameters) for unit in units),
        kept_shard_bytes=each.weight * sum(shard(unit, unit.num_tied) for unit in units),
        gradient_bytes=sum(gradients),
        gradient_shard_bytes=each.gradient * sum(shard(unit, unit.num_trainable) for unit in units),
        state_bytes=each.state * sum(shard(unit, unit.num_updated) for unit in units),
        masters=each.masters,
        activation_bytes_per_row=rows.activation_bytes,
        working_bytes_per_row=rows.working_bytes,
        boundary_bytes_per_row=rows.boundary_bytes,
        largest_unit_bytes=max(whole, default=0),
        largest_unit_gradient_bytes=max(gradients, default=0),
    )


def is_layer(module: str) -> bool:
    """Whether a module is one of a container's numbered layers: what recomputation is for."""
    return module.rpartition(".")[2].isdigit()


# -- a workload's --------------------------------------------------------------------------


def list_units(plan: Plan, workload: Workload) -> tuple[tuple[UnitSize, ...], ...]:
    """The FSDP units of each ministage that own parameters, in the order in which they are gathered.

    Each module is one; those that share a weight within a ministage are one together, which comes last.
    """
    cut = [(a, b) for a, b in workload.ties if plan.ministage_of[a] != plan.ministage_of[b]]
    joined = {name for tie in workload.ties if tie not in cut for name in tie}
    lent: dict[str, int] = {}
    for owner, borrower in cut:
        lent[owner] = max(lent.get(owner, 0), workload.kind_of[borrower].num_borrowed)
    borrowers = {borrower for _, borrower in cut}
    listed = []
    for ministage in plan.ministages:
        units, together = [], UnitSize(num_parameters=0, num_trainable=0)
        for name in ministage.modules:
            kind, lends = workload.kind_of[name], lent.get(name, 0)
            unit = _unit(kind, borrows=name in borrowers, num_lent=lends, is_cut=is_layer(name))
            if name in joined:
                together += unit
            else:
                units.append(unit)
        listed.append(tuple(unit for unit in (*units, together) if unit.num_parameters))
    return tuple(listed)


def _unit(kind: LayerKind, *, borrows: bool, num_lent: int, is_cut: bool) -> UnitSize:
    borrowed, trained = (kind.num_borrowed, kind.borrowed_trainable) if borrows else (0, 0)
    return UnitSize(
        num_parameters=kind.num_parameters + borrowed,
        num_trainable=kind.trainable + trained,
        num_borrowed=trained,
        num_tied=borrowed + num_lent,
        is_cut=is_cut,
    )


GATHERS_PER_LAYER = 2
"""All-gathers of activations in the forward of a layer that tensor parallelism cuts, one before its attention
and one before its feed-forward; there are as many reduce-scatters, and in the backward as many of both."""

KeptBytes = Mapping[tuple[str, str, Recompute], float]
"""What was measured that one row of a layer keeps for its backward, by kind, device and recomputation."""


def find_row_bytes(
    plan: Plan,
    workload: Workload,
    ministage: int,
    device: str = "",
    measured: KeptBytes | None = None,
    degree: int = 1,
) -> RowBytes:
    """What a row of a ministage keeps, needs and passes on, with or without recomputation of layers: as
    measured on a device of that type, else as the workload counts it. A rank of a replica of that degree
    has its positions of all, and while a layer computes what its attention and its feed-forward take in of
    all positions, which autograd keeps."""
    group_recomputes = plan.group_of(ministage).recompute == "layer"
    kept, working = 0, 0
    for name in plan.ministages[ministage].modules:
        kind = workload.kind_of[name]
        found = measured or {}
        whole = math.ceil(found.get((kind.name, device, "none"), kind.activation_bytes_per_row) / degree)
        inside = math.ceil(kind.working_bytes_per_row / degree)
        inputs = kind.input_elements_per_row * workload.itemsize
        if is_layer(name):
            whole += GATHERS_PER_LAYER * (inputs - inputs // degree)
        if group_recomputes and is_layer(name):
            kept += math.ceil(found.get((kind.name, device, "layer"), inputs) / degree)
            working = max(working, whole + inside)
        else:
            kept += whole
            working = max(working, inside)
    boundaries = find_boundary_bytes(plan, workload)[ministage : ministage + 2]
    entering = [math.ceil(num_bytes / degree) for num_bytes in boundaries]
    return RowBytes(
        activation_bytes=max(kept, entering[0]), working_bytes=working, boundary_bytes=max(entering)
    )


def find_boundary_bytes(plan: Plan, workload: Workload) -> tuple[int, ...]:
    """Bytes of a row that enters each ministage from the one before; 0 for the first."""
    return (0, *(kind.input_elements_per_row * workload.itemsize for kind in _list_entered(plan, workload)))


def find_gradient_bytes(plan: Plan, workload: Workload) -> tuple[int, ...]:
    """Bytes of a row's gradients that each ministage sends to the one before; 0 for the first."""
    return (0, *(kind.gradient_elements * workload.itemsize for kind in _list_entered(plan, workload)))


def _list_entered(plan: Plan, workload: Workload) -> list[LayerKind]:
    """The first layer of each ministage but the first."""
    return [workload.kind_of[ministage.modules[0]] for ministage in plan.ministages[1:]]


def measure_ministages(
    plan: Plan, workload: Workload, *, devices: Sequence[str] | None = None, measured: KeptBytes | None = None
) -> tuple[Mapping[int, MinistageBytes], ...]:
    """For each rank of a plan of the workload the sizes of each of its ministages, its largest share of what
    is divided; activations as measured on `devices`, each rank's type, else as the workload has them."""
    units = list_units(plan, workload)
    each = ParameterBytes.of(workload)
    types = [""] * plan.num_ranks if devices is None else devices

    @cache  # Of thousands of ranks few differ in this.
    def measure(group: int, device: str, degree: int) -> Mapping[int, MinistageBytes]:
        return {
            i: add_up(
                units[i],
                find_row_bytes(plan, workload, i, device, measured, degree),
                each,
                num_shards=_count_shards(plan, i),
                degree=degree,
                num_replicas=_count_replicas(plan, i),
            )
            for i in plan.ministages_of_group(group)
        }

    return tuple(
        measure(plan.group_of_rank[rank], types[rank], plan.replica_of(rank).degree)
        for rank in range(plan.num_ranks)
    )


def count_updated(plan: Plan, workload: Workload) -> dict[tuple[int, int], int]:
    """Parameters that one update changes, by rank and ministage."""
    units = list_units(plan, workload)

    @cache
    def count(i: int, degree: int) -> int:
        pieces, shards = degree * _count_replicas(plan, i), _count_shards(plan, i)
        return sum(largest_shard(unit.num_updated, pieces if unit.is_cut else shards) for unit in units[i])

    return {
        (rank, i): count(i, plan.replica_of(rank).degree)
        for rank in range(plan.num_ranks)
        for i in plan.ministages_of_rank(rank)
    }


def _count_shards(plan: Plan, ministage: int) -> int:
    """Ranks that share what is not cut."""
    group = plan.group_of(ministage)
    return count_shards(group.zero, len(group.flat_ranks))


def _count_replicas(plan: Plan, ministage: int) -> int:
    """Ranks that share a piece of what is cut."""
    group = plan.group_of(ministage)
    return count_shards(group.zero, len(group.replicas))


def find_tie_bytes(plan: Plan, workload: Workload, itemsize: int) -> dict[tuple[int, int], int]:
    """Bytes of the weights that train in two ministages, by ministages (owner, borrower)."""
    shared: Counter[tuple[int, int]] = Counter()
    for owner, borrower in workload.ties:
        pair = plan.ministage_of[owner], plan.ministage_of[borrower]
        if pair[0] != pair[1]:
            shared[pair] += workload.kind_of[borrower].borrowed_trainable * itemsize
    return shared
