"""How fast every two devices of a cluster are joined, kept once for each two blocks of devices.

A block is the devices of one type on one node: they are interchangeable, which is what lets the planner
group a thousand devices in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from zorselike.cost.catalogue import find_memory_bytes
from zorselike.errors import ClusterError
from zorselike.plan.cluster.cluster import Cluster, Place

Rates = NDArray[np.float64]

Group = tuple[int, ...]
"""Devices of one group, rising: indices into `Cluster.places`."""

Partition = tuple[Group, ...]
"""Groups that have each device once, by their first device."""


@dataclass(frozen=True)
class Block:
    """Devices that nothing tells apart."""

    node: int
    type: str
    memory_bytes: int | None
    """None where it is not known."""
    devices: Group


@dataclass(frozen=True, eq=False)
class Bandwidths:
    """Bytes per second between the devices that are planned for."""

    cluster: Cluster
    blocks: tuple[Block, ...]
    rates: Rates
    """Between one device of a block and one of another [num_blocks, num_blocks], on the diagonal between
    two of one block; 0 where nothing joins them."""
    group_rates: Rates
    """The same, and 0 between devices that may not be in one group."""
    _counts: dict[Group, tuple[tuple[int, int], ...]] = field(default_factory=dict, init=False, repr=False)
    """By group: candidates have most of their groups in common."""
    _slowest: dict[Group, float] = field(default_factory=dict, init=False, repr=False)

    @property
    def devices(self) -> Group:
        return tuple(sorted(device for block in self.blocks for device in block.devices))

    @cached_property
    def block_of(self) -> dict[int, int]:
        return {device: b for b, block in enumerate(self.blocks) for device in block.devices}

    @cached_property
    def pair_codes(self) -> NDArray[np.int64]:
        """A number for all that matters of two devices, by their blocks: what they are, their bandwidth, the
        link that names their nodes, and whether they are on one node [num_blocks, num_blocks]."""
        nodes = [replace(self.cluster.nodes[block.node], name="") for block in self.blocks]
        names = [(b.type, b.memory_bytes, node) for b, node in zip(self.blocks, nodes, strict=True)]
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        kinds = np.array([numbers[name] for name in names], dtype=np.int64)
        on_node = np.array([block.node for block in self.blocks])
        distinct, rates = np.unique(self.rates, return_inverse=True)
        pairs = kinds[:, None] * len(numbers) + kinds
        codes: NDArray[np.int64] = (pairs * len(distinct) + rates.reshape(pairs.shape)) * 2
        codes += on_node[:, None] == on_node
        links = {link: i for i, link in enumerate(dict.fromkeys(self.cluster.node_links.values()), start=1)}
        codes *= len(links) + 1  # Links of one bandwidth may differ in latency, or for small transfers.
        numbers_of = {node.name: n for n, node in enumerate(self.cluster.nodes)}
        blocks = {
            name: np.flatnonzero(on_node == numbers_of[name])
            for name in {name for pair in self.cluster.node_links for name in pair}
        }
        for (a, b), link in self.cluster.node_links.items():
            for first, second in ((a, b), (b, a)):
                codes[np.ix_(blocks[first], blocks[second])] += links[link]
        return codes

    @cached_property
    def _pair_numbers(self) -> NDArray[np.uint64]:
        """Random, one for each of `pair_codes` [num_blocks, num_blocks]."""
        distinct, index = np.unique(self.pair_codes, return_inverse=True)
        numbers = np.random.default_rng(0).integers(2**63, size=len(distinct), dtype=np.uint64)
        return numbers[index.reshape(self.pair_codes.shape)]

    @cached_property
    def _count_numbers(self) -> NDArray[np.uint64]:
        """The same for numbers of devices of a block: 4, 1 and 1 have the same squares as 3 and 3."""
        most = max(len(block.devices) for block in self.blocks)
        return np.random.default_rng(1).integers(2**63, size=most + 1, dtype=np.uint64)

    def describe(self, partition: Partition) -> Hashable:
        """Equal for partitions that differ only in which of alike devices, or of alike nodes, are where."""
        counts = np.zeros((len(partition), len(self.blocks)), dtype=np.uint64)
        for g, group in enumerate(partition):
            for block, number in self.count_blocks(group):
                counts[g, block] = self._count_numbers[number]
        # Sums over the pairs of blocks of each two groups, modulo 2^64: equal for equal pairs.
        sums = counts @ self._pair_numbers @ counts.T
        inside = sums.diagonal().tolist()
        others = [sorted(own) for own in sums.tolist()]
        return tuple(sorted(zip(inside, map(tuple, others), strict=True)))

    def join_alike(self) -> Bandwidths:
        """Nodes that nothing but their names tells apart as one block each, as if all their devices were
        joined as two of different nodes are: coarse, for a cluster with more nodes than can be looked at."""
        named = {name for pair in self.cluster.node_links for name in pair}
        alike: dict[object, list[int]] = {}
        for b, block in enumerate(self.blocks):
            node = self.cluster.nodes[block.node]
            key = node if node.name in named else replace(node, name="")
            alike.setdefault((key, block.type, block.memory_bytes), []).append(b)
        blocks = []
        for own in alike.values():
            devices = tuple(sorted(device for b in own for device in self.blocks[b].devices))
            blocks.append(replace(self.blocks[own[0]], devices=devices))
        first, last = ([own[at] for own in alike.values()] for at in (0, -1))
        rates, group_rates = (own[np.ix_(first, last)].copy() for own in (self.rates, self.group_rates))
        return Bandwidths(self.cluster, tuple(blocks), rates, group_rates)

    def count_blocks(self, group: Group) -> tuple[tuple[int, int], ...]:
        """`(block, how many of its devices)`, rising by block."""
        if group not in self._counts:
            self._counts[group] = tuple(sorted(Counter(self.block_of[device] for device in group).items()))
        return self._counts[group]

    def slowest_link(self, group: Group) -> float:
        """Bytes per second between the two devices of a group that are joined worst, which bound a ring
        over it; infinite for one device, 0 for devices that may not be in one group."""
        if group not in self._slowest:
            counts = self.count_blocks(group)
            blocks = [block for block, _ in counts]
            rates = self.group_rates[np.ix_(blocks, blocks)]
            alone = [i for i, (_, num_devices) in enumerate(counts) if num_devices == 1]
            rates[alone, alone] = np.inf
            self._slowest[group] = float(rates.min())
        return self._slowest[group]

    def connected_parts(self, devices: Iterable[int] | None = None) -> Partition:
        """Devices (all, by default) that some way over these devices joins; one part in a sound cluster."""
        chosen = self.devices if devices is None else tuple(devices)
        left = np.zeros(len(self.blocks), dtype=bool)
        left[[self.block_of[device] for device in chosen]] = True
        part_of = np.zeros(len(self.blocks), dtype=np.int64)
        for first in np.flatnonzero(left):
            reached = np.array([first] if left[first] else [], dtype=np.int64)
            while len(reached):
                left[reached], part_of[reached] = False, first
                reached = np.flatnonzero(left & (self.rates[reached] > 0).any(axis=0))
        parts: dict[int, list[int]] = {}
        for device in chosen:
            parts.setdefault(int(part_of[self.block_of[device]]), []).append(device)
        return sort_groups(parts.values())


def read_bandwidths(
    cluster: Cluster, devices: Iterable[int] | None = None, *, span_regions: bool = False
) -> Bandwidths:
    """The bandwidths between some devices of a cluster (indices into `cluster.places`), or all.

    Groups may span regions only where that is asked for (Sailor 4.2.1, H5).

    Raises:
        ClusterError: There are no devices, or nothing says how those of one node are connected.
    """
    chosen = sorted(set(range(cluster.num_devices) if devices is None else devices))
    if not chosen:
        raise ClusterError("there are no devices to plan for; add nodes, or raise the quotas")
    blocks = _find_blocks(cluster, chosen)
    nodes = sorted({block.node for block in blocks})
    between = _rates_between_nodes(cluster, nodes)
    rows = np.searchsorted(nodes, [block.node for block in blocks])
    rates = between[np.ix_(rows, rows)]
    regions = np.array([cluster.nodes[block.node].region for block in blocks])
    may_share = (regions[:, None] == regions) | span_regions
    return Bandwidths(cluster, blocks, rates, np.where(may_share, rates, 0.0))


def sort_groups(groups: Iterable[Iterable[int]]) -> Partition:
    """The same partition in its one canonical form."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _find_blocks(cluster: Cluster, devices: Sequence[int]) -> tuple[Block, ...]:
    members: dict[tuple[int, str, int | None], list[int]] = {}
    for device in devices:
        place = cluster.places[device]
        key = (place.node, cluster.device_type(place), find_memory_bytes(cluster, place))
        members.setdefault(key, []).append(device)
    return tuple(Block(*key, tuple(own)) for key, own in members.items())


def _rates_between_nodes(cluster: Cluster, nodes: Sequence[int]) -> Rates:
    """Between two devices of each two nodes, and of one; looked up once for nodes that are alike to all
    links, since a thousand nodes are half a million pairs."""
    named = {name for pair in cluster.node_links for name in pair}
    alike: dict[object, list[int]] = {}
    for row, index in enumerate(nodes):
        node = cluster.nodes[index]
        key = (node.name if node.name in named else "", node.zone, node.region, node.nic)
        alike.setdefault(key, []).append(row)
    rates = np.zeros((len(nodes), len(nodes)))
    for first, second in combinations_with_replacement(alike.values(), 2):
        if first[0] != second[-1]:
            rate = _rate_between(cluster, nodes[first[0]], nodes[second[-1]])
            rates[np.ix_(first, second)] = rates[np.ix_(second, first)] = rate
    for row, index in enumerate(nodes):
        rates[row, row] = _rate_inside(cluster, index)
    return rates


def _rate_between(cluster: Cluster, a: int, b: int) -> float:
    """What one transfer between two nodes has at most, on its link and on what it shares with others."""
    try:
        rate = cluster.link(Place(a, 0), Place(b, 0)).bandwidth_bytes_per_s
    except ClusterError:
        return 0.0
    first, second = cluster.nodes[a], cluster.nodes[b]
    bounds = [nic.bandwidth_bytes_per_s for nic in (first.nic, second.nic) if nic is not None]
    for x, y in ((first.region, second.region), (first.zone, second.zone)):
        shared = cluster.shared_links.get((min(x, y), max(x, y)))
        if shared is not None and x and y:
            bounds.append(shared)
    return min([rate, *bounds])


def _rate_inside(cluster: Cluster, node: int) -> float:
    """0 where there is one device."""
    if len(cluster.nodes[node].devices) == 1:
        return 0.0
    rate = cluster.link(Place(node, 0), Place(node, 1)).bandwidth_bytes_per_s
    total = cluster.nodes[node].fabric_total_bytes_per_s
    return rate if total is None else min(rate, total)
