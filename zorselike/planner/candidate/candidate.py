"""A plan before it has ranks: who is in which group, which layers and rows it has, and how it holds them."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from zorselike.cost.parameter_bytes import count_shards
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.groups.replicas import Replica

Sizes = tuple[int, ...]
"""Rows of one replica's microbatches, in processing order."""


@dataclass(frozen=True)
class DealtRows:
    """Who of a group computes which microbatches, as tables of what they take are kept by it."""

    devices: tuple[int, ...]
    sizes: tuple[Sizes, ...]
    degrees: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept: a search asks for it again and again, and some have thousands of devices."""
        return hash((self.devices, self.sizes, self.degrees))


@dataclass(frozen=True)
class CandidateGroup:
    """One group."""

    devices: tuple[int, ...]
    """Indices into `Cluster.places`."""
    mode: Mode
    sizes: tuple[Sizes, ...]
    """Microbatches of each replica; `()` for one that holds shards only."""
    max_in_flight: int | None = None
    """As `Group.max_in_flight`."""
    degrees: tuple[int, ...] = ()
    """Devices of each tensor-parallel replica, whose devices follow each other; empty: each is one device."""

    @cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """What computes microbatches: devices, or several together."""
        if not self.degrees:
            return tuple((device,) for device in self.devices)
        ends = accumulate(self.degrees, initial=0)
        return tuple(self.devices[start:stop] for start, stop in pairwise(ends))

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first device of each replica."""
        return tuple(own[0] for own in self.replicas) if self.degrees else self.devices

    @property
    def degree(self) -> int:
        """As `Group.degree`."""
        return max(self.degrees, default=1)

    def degree_of(self, position: int) -> int:
        """Devices of the replica at a position."""
        return self.degrees[position] if self.degrees else 1

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dealt, self.mode, self.max_in_flight))

    @cached_property
    def dealt(self) -> DealtRows:
        return DealtRows(self.devices, self.sizes, self.degrees)

    def held_sizes(self, position: int, num_ministages: int) -> Sizes:
        """The microbatches of a replica whose activations it holds at once, of each of its ministages."""
        sizes = self.sizes[position]
        return sizes if self.max_in_flight is None else sizes[: -(-self.max_in_flight // num_ministages)]

    @property
    def num_shards(self) -> int:
        """Devices that share parameters, gradients and optimizer state of what is not cut."""
        return count_shards(self.mode.zero, len(self.devices))

    @property
    def num_replica_shards(self) -> int:
        """Devices that share a piece of what is cut, one of each replica."""
        return count_shards(self.mode.zero, len(self.sizes))

    def count_shards_of(self, *, is_cut: bool, degree: int) -> int:
        """How many shards of a module there are that are as large as that of a device of a replica of so many
        devices."""
        return degree * self.num_replica_shards if is_cut else self.num_shards

    @cached_property
    def microbatches_per_device(self) -> int:
        """The most microbatches of a replica."""
        return max(len(own) for own in self.sizes)


@dataclass(frozen=True)
class CandidatePlan:
    """All groups, in the order in which the pipeline visits them."""

    groups: tuple[CandidateGroup, ...]
    owners: tuple[int, ...]
    """The group of each ministage."""
    ends: tuple[int, ...]
    """Ministage `i` has the layers `[ends[i - 1], ends[i])`."""
    deals_otherwise: bool = False
    """Whether rows are dealt in blocks where that is not the first choice, or the other way round
    (`deal_rows.py`); of no account to estimates and memory."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.groups, self.owners, self.ends, self.deals_otherwise))

    @property
    def num_devices(self) -> int:
        return sum(len(group.devices) for group in self.groups)

    @property
    def num_ministages(self) -> int:
        return len(self.owners)

    @property
    def degree(self) -> int:
        """The largest tensor-parallel degree."""
        return max(group.degree for group in self.groups)

    @property
    def bounds_in_flight(self) -> bool:
        """As `Plan.bounds_in_flight`."""
        return any(group.max_in_flight is not None for group in self.groups)

    @property
    def has_rounds(self) -> bool:
        """Whether some of several groups have several ministages."""
        return len(self.owners) > len(self.groups) > 1

    @cached_property
    def num_actions(self) -> int:
        """About how many actions its schedule has: computations, and the transfers between groups that follow
        each other, whose microbatches overlap in about as many pieces as both have together."""
        per_group = [
            sum(len(own) * group.degree_of(position) for position, own in enumerate(group.sizes))
            if group.degrees
            else sum(map(len, group.sizes))
            for group in self.groups
        ]
        computed = sum(2 * per_group[owner] for owner in self.owners)
        moved = sum(4 * (per_group[a] + per_group[b]) for a, b in pairwise(self.owners) if a != b)
        return computed + moved

    def with_mode(self, g: int, mode: Mode) -> CandidatePlan:
        """The same with another mode of group `g`."""
        group = replace(self.groups[g], mode=mode)
        return replace(self, groups=(*self.groups[:g], group, *self.groups[g + 1 :]))

    def layers_of(self, ministage: int) -> range:
        """Indices of a ministage's layers."""
        return range(self.ends[ministage - 1] if ministage else 0, self.ends[ministage])

    def ministage_of(self, layer: int) -> int:
        return bisect_right(self.ends, layer)

    def owner_of(self, layer: int) -> int:
        """The group that has a layer."""
        return self.owners[self.ministage_of(layer)]

    def ministages_of(self, group: int) -> tuple[int, ...]:
        return tuple(i for i, owner in enumerate(self.owners) if owner == group)


def list_largest(sizes: Sequence[Sizes], kinds: Sequence[Hashable]) -> list[int]:
    """Positions of replicas; of those of a kind none that has no more rows, in no larger and no more
    microbatches, than another."""
    kept: dict[Hashable, dict[tuple[int, int, int], int]] = {}
    for position, (kind, own) in enumerate(zip(kinds, sizes, strict=True)):
        work = sum(own), max(own, default=0), len(own)
        kept.setdefault(kind, {}).setdefault(work, position)
    return [
        position
        for works in kept.values()
        for work, position in works.items()
        if not any(other != work and all(map(operator.ge, other, work)) for other in works)
    ]
