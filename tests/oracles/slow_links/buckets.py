"""The wires of a cluster as token buckets in memory that all ranks share.

A message goes in chunks. Each chunk takes its bytes from every bucket on its way (out of a node,
between two nodes, into a node, or a node's own fabric) and is over when the slowest of them has let
it through; only then the same message asks again. So messages that meet in a bucket take turns,
and one that a narrower bucket holds up leaves its turns to others. Nothing here comes from the
cost model: who gets how much follows from the turns.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zorselike.plan.cluster.cluster import Cluster, Link, Place

from .transport import Carry, sleep_until

CHUNK_S = 0.004
"""What a chunk takes on the slowest bucket of its kind."""
_SLOTS = 64
"""Collectives of one group that may be under way, or just done, at once."""
_MAX_GROUPS = 24
"""Different sets of ranks that have collectives."""


@dataclass(frozen=True)
class Path:
    """The way of a message."""

    buckets: tuple[int, ...]
    """Indices of the buckets on the way."""
    latency_s: float
    chunk_bytes: float


@dataclass(frozen=True)
class Buckets:
    """All wires of a cluster."""

    names: tuple[str, ...]
    bytes_per_s: tuple[float, ...]
    paths: dict[tuple[int, int], Path]
    """Paths by source and target rank; two ranks in one place have none."""


def lay_buckets(cluster: Cluster, places: Sequence[Place]) -> Buckets:
    """The buckets between the ranks' places: a node's NIC each way, each ordered pair of nodes, what all
    nodes of two regions share, and inside a node its devices each way."""
    rates: dict[str, float] = {}
    ways: dict[tuple[int, int], tuple[list[str], float]] = {}
    for source, a in enumerate(places):
        for target, b in enumerate(places):
            if source != target:
                link = cluster.link(a, b)
                on_way = _on_the_way(cluster, a, b, link)
                rates |= on_way
                ways[source, target] = list(on_way), link.latency_s
    names = tuple(rates)
    index = {name: i for i, name in enumerate(names)}
    inside, between = (
        min((rate for name, rate in rates.items() if ("fabric" in name) is is_fabric), default=0.0)
        for is_fabric in (True, False)
    )
    return Buckets(
        names,
        tuple(rates.values()),
        {
            pair: Path(
                tuple(index[name] for name in on_way),
                latency_s,
                CHUNK_S * (inside if places[pair[0]].node == places[pair[1]].node else between),
            )
            for pair, (on_way, latency_s) in ways.items()
        },
    )


def _on_the_way(cluster: Cluster, a: Place, b: Place, link: Link) -> dict[str, float]:
    """Buckets of a message by name, with what each carries in bytes per second."""
    first, second = cluster.nodes[a.node], cluster.nodes[b.node]
    if a.node == b.node:
        found = {
            f"fabric of {first.name}, {place.local_rank} {way}": link.bandwidth_bytes_per_s
            for place, way in ((a, "out"), (b, "in"))
        }
        if first.fabric_total_bytes_per_s is not None:
            found[f"fabric of {first.name}"] = first.fabric_total_bytes_per_s
        return found
    found = {f"{first.name} to {second.name}": link.bandwidth_bytes_per_s}
    for node, way in ((first, "out"), (second, "in")):
        if node.nic is not None:
            found[f"{node.name}, {way}"] = node.nic.bandwidth_bytes_per_s
    for x, y in ((first.region, second.region), (first.zone, second.zone)):
        shared = cluster.shared_links.get((min(x, y), max(x, y)))
        if shared is not None:
            found[f"{x} to {y}"] = shared
    return found


def order_ring(places: Sequence[Place], members: Sequence[int]) -> tuple[int, ...]:
    """Ranks in the order of a ring that enters and leaves each node once."""
    return tuple(sorted(members, key=lambda rank: places[rank]))


class BucketWires:
    """The buckets at work (`transport.Wires`); made before ranks are forked."""

    def __init__(self, buckets: Buckets, places: Sequence[Place]) -> None:
        self._buckets = buckets
        self._places = tuple(places)
        context = multiprocessing.get_context("fork")
        self._lock = context.Lock()
        self._free = mmap.mmap(-1, max(1, 8 * len(buckets.names)))
        """When each bucket is free again."""
        self._groups = mmap.mmap(-1, 8 * _MAX_GROUPS)
        """The members of each group that has met, as bits."""
        self._meetings = mmap.mmap(-1, 24 * _MAX_GROUPS * _SLOTS)
        """By group and number: the number plus one, how many edges of the ring are over, when."""
        self._wakers = {
            (rank, group): os.eventfd(0, os.EFD_SEMAPHORE)
            for rank in range(len(places))
            for group in range(_MAX_GROUPS)
        }

    def close(self) -> None:
        """Gives back what tells ranks that a collective is over; ranks that are forked have their own."""
        for waker in self._wakers.values():
            os.close(waker)
        self._wakers.clear()

    # -- messages --------------------------------------------------------------------------

    def delays_message(self, source: int, target: int) -> bool:
        return (source, target) in self._buckets.paths

    def post(self, source: int, target: int, num_bytes: int) -> Carry:
        posted_s = time.monotonic()
        path = self._buckets.paths[source, target]

        def carry(free_s: float) -> float:
            left_s = self._move(path, num_bytes, max(posted_s, free_s))
            sleep_until(left_s + path.latency_s)
            return left_s

        return carry

    def _move(self, path: Path, num_bytes: float, start_s: float) -> float:
        """Takes the bytes chunk by chunk; returns when the last one is through."""
        through_s, left = start_s, num_bytes
        while left > 0:
            size = min(left, path.chunk_bytes)
            through_s = self.take(path, size, through_s)
            left -= size
            if left > 0 and through_s - time.monotonic() > CHUNK_S / 2:
                sleep_until(through_s)
        return through_s

    def take(self, path: Path, num_bytes: float, start_s: float) -> float:
        """A chunk that is ready at a time; returns when it is through. Does not wait."""
        through_s = start_s
        with self._lock:
            for bucket in path.buckets:
                (free_s,) = struct.unpack_from("d", self._free, 8 * bucket)
                free_s = max(free_s, start_s) + num_bytes / self._buckets.bytes_per_s[bucket]
                struct.pack_into("d", self._free, 8 * bucket, free_s)
                through_s = max(through_s, free_s)
        return through_s

    # -- collectives -----------------------------------------------------------------------

    def delays_collective(self, members: tuple[int, ...]) -> bool:
        return len(members) > 1

    def collect(self, rank: int, members: tuple[int, ...], number: int, num_bytes: int, rounds: int) -> None:
        """Every member moves what its edge of the ring carries and waits for the slowest edge."""
        ring = order_ring(self._places, members)
        path = self._buckets.paths[rank, ring[(ring.index(rank) + 1) % len(ring)]]
        hops = rounds * (len(ring) - 1)
        # A byte goes around all edges but one.
        latencies = [self._buckets.paths[edge].latency_s for edge in pairwise([*ring, ring[0]])]
        around_s = rounds * (sum(latencies) - min(latencies))
        edge_s = self._move(path, hops * num_bytes / len(ring), time.monotonic()) + around_s
        sleep_until(self._meet(rank, members, number, edge_s))

    def _meet(self, rank: int, members: tuple[int, ...], number: int, edge_s: float) -> float:
        """The time at which the last edge is over; waits until all are known."""
        group = self._number_group(members)
        offset = 24 * (group * _SLOTS + number % _SLOTS)
        with self._lock:
            known, count, end_s = struct.unpack_from("qqd", self._meetings, offset)
            if known != number + 1:
                count, end_s = 0, 0.0
            count, end_s = count + 1, max(end_s, edge_s)
            struct.pack_into("qqd", self._meetings, offset, number + 1, count, end_s)
        if count == len(members):
            for other in members:
                if other != rank:
                    os.eventfd_write(self._wakers[other, group], 1)
        else:
            os.eventfd_read(self._wakers[rank, group])
            (end_s,) = struct.unpack_from("d", self._meetings, offset + 16)
        return float(end_s)

    def _number_group(self, members: tuple[int, ...]) -> int:
        mask = sum(1 << rank for rank in members)
        with self._lock:
            for group in range(_MAX_GROUPS):
                (known,) = struct.unpack_from("q", self._groups, 8 * group)
                if known in (0, mask):
                    struct.pack_into("q", self._groups, 8 * group, mask)
                    return group
        raise RuntimeError(f"more than {_MAX_GROUPS} different groups have collectives")
