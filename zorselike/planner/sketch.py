"""A plan before it has ranks: who is in which group, which layers and rows it has, and how it holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from zorselike.plan.plan import Device, Group, Microbatch, Ministage, Plan
from zorselike.plan.shares import deal_rows
from zorselike.planner.layer_table import LayerTable
from zorselike.planner.modes import Mode
from zorselike.planner.problem import PlanProblem

Sizes = tuple[int, ...]
"""Rows of one device's microbatches, in processing order."""


@dataclass(frozen=True)
class GroupSketch:
    """One group."""

    devices: tuple[int, ...]
    """Indices into `Cluster.places`."""
    mode: Mode
    sizes: tuple[Sizes, ...]
    """Of each device; `()` for one that holds shards only."""
    max_in_flight: int | None = None
    """As `Group.max_in_flight`."""

    def held_sizes(self, position: int) -> Sizes:
        """The microbatches of a device whose activations it holds at once."""
        own = self.sizes[position]
        return own if self.max_in_flight is None else own[: self.max_in_flight]

    @cached_property
    def num_rounds(self) -> int:
        """The most microbatches of a device."""
        return max(len(own) for own in self.sizes)


@dataclass(frozen=True)
class Sketch:
    """All groups, in the order in which the pipeline visits them."""

    groups: tuple[GroupSketch, ...]
    owners: tuple[int, ...]
    """The group of each ministage."""
    ends: tuple[int, ...]
    """Ministage `i` has the layers `[ends[i - 1], ends[i])`."""

    @property
    def num_devices(self) -> int:
        return sum(len(group.devices) for group in self.groups)

    @property
    def num_ministages(self) -> int:
        return len(self.owners)

    @property
    def bounds_in_flight(self) -> bool:
        """As `Plan.bounds_in_flight`."""
        return any(group.max_in_flight is not None for group in self.groups)

    @cached_property
    def num_actions(self) -> int:
        """About how many actions its schedule has: computations, and the transfers between groups that follow
        each other, whose microbatches overlap in about as many pieces as both have together."""
        own = [sum(map(len, group.sizes)) for group in self.groups]
        computed = sum(2 * own[owner] for owner in self.owners)
        moved = sum(4 * (own[a] + own[b]) for a, b in pairwise(self.owners) if a != b)
        return computed + moved

    def layers_of(self, ministage: int) -> range:
        """Indices of a ministage's layers."""
        return range(self.ends[ministage - 1] if ministage else 0, self.ends[ministage])

    def ministages_of(self, group: int) -> tuple[int, ...]:
        return tuple(i for i, owner in enumerate(self.owners) if owner == group)


def make_plan(sketch: Sketch, problem: PlanProblem, table: LayerTable) -> Plan:
    """The plan of a sketch, ranks numbered group by group."""
    cluster = problem.cluster
    devices: list[Device] = []
    groups: list[Group] = []
    for own in sketch.groups:
        ranks = tuple(range(len(devices), len(devices) + len(own.devices)))
        types = []
        for rank, device in zip(ranks, own.devices, strict=True):
            place = cluster.places[device]
            types.append(cluster.device_type(place))
            devices.append(Device(rank, cluster.nodes[place.node].name, place.local_rank, types[-1]))
        groups.append(
            Group(
                ranks=ranks,
                microbatches=order_rows(own, ranks, types, table),
                zero=own.mode.zero,
                grad_reduce=own.mode.grad_reduce,
                offload=own.mode.offload,
                recompute=own.mode.recompute,
                max_in_flight=own.max_in_flight,
            )
        )
    ministages = tuple(
        Ministage(owner, tuple(table.modules[layer] for layer in sketch.layers_of(i)))
        for i, owner in enumerate(sketch.owners)
    )
    return Plan(
        global_batch=problem.global_batch,
        groups=tuple(groups),
        ministages=ministages,
        devices=tuple(devices),
        sequence_length=problem.workload.sequence_length,
        model=problem.workload.model,
        cluster_fingerprint=cluster.fingerprint,
        workload_fingerprint=problem.workload.fingerprint,
    )


def order_rows(
    group: GroupSketch, ranks: Sequence[int], types: Sequence[str], table: LayerTable
) -> tuple[Microbatch, ...]:
    """The first rows of the batch to what is computed first. Where the ranks wait for each other after each
    microbatch, or backwards come before all is forward, these are rounds; else each goes through its own at
    its own speed."""
    pieces: list[tuple[float, int, int]] = []
    for rank, device, own in zip(ranks, types, group.sizes, strict=True):
        if group.mode.reduces_per_microbatch or group.max_in_flight is not None:
            pieces += [(float(number), rank, size) for number, size in enumerate(own)]
            continue
        seconds = table.model_s(device, group.mode.recompute, max(own, default=0))
        ends = list(accumulate((seconds[size - 1] for size in own), initial=0.0))
        pieces += [((ends[n] + ends[n + 1]) / 2, rank, size) for n, size in enumerate(own)]
    return deal_rows(pieces)
