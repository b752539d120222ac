"""Tensor-parallel replicas: like devices of one node that compute the same rows together (Sailor 4.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import NamedTuple

from zorselike.cost.catalogue import find_memory_bytes
from zorselike.cost.network import Network
from zorselike.cost.replica_times import time_exchange
from zorselike.plan.cluster.cluster import Cluster

DEGREES = (1, 2, 4, 8)
"""What is planned with."""

Degrees = tuple[tuple[str, int], ...]
"""The most devices of a replica by their type, of types that have more than one, in order of their names."""

Replica = tuple[int, ...]
"""Devices, as indices into `Cluster.places`."""


class ReplicaKind(NamedTuple):
    """Replicas of several devices that compute alike."""

    device: str
    """Their type."""
    degree: int
    node: int
    """The first of the nodes that are like theirs, whose fabric joins them."""


Computer = str | ReplicaKind
"""What computes a microbatch: a device of a type, or a replica."""


def degree_of(computer: Computer) -> int:
    """How many devices compute a microbatch together."""
    return 1 if isinstance(computer, str) else computer.degree


def type_of(computer: Computer) -> str:
    """The type of its devices."""
    return computer if isinstance(computer, str) else computer.device


def with_degree(degrees: Degrees, device: str, degree: int) -> Degrees:
    """The same but for one type of device."""
    changed = {**dict(degrees), device: degree}
    return tuple(sorted((name, number) for name, number in changed.items() if number > 1))


def merge_degrees(first: Degrees, second: Degrees) -> Degrees:
    """Of two groups that become one; the first's where both have devices of a type."""
    return tuple(sorted({**dict(second), **dict(first)}.items()))


class ReplicaCuts:
    """How devices of one cluster are cut into replicas, and what those exchange."""

    def __init__(
        self, cluster: Cluster, most: int, measured: Iterable[str], make_network: Callable[[], Network]
    ) -> None:
        """`most`: devices of a replica at most; `measured`: nodes whose links were measured by name;
        `make_network` gives that between all places."""
        self._cluster, self._most, self._make_network = cluster, most, make_network
        self._named = {*measured}.union(*cluster.node_links)
        self._alike = [
            (place.node, cluster.device_type(place), find_memory_bytes(cluster, place))
            for place in cluster.places
        ]
        """Of devices for which this is equal a replica may be made."""
        self.cut = cache(self._cut)
        self.most_by_type = cache(self._find_most)
        self.exchange_s = cache(self._find_exchange_s)

    def _cut(self, devices: tuple[int, ...], degrees: Degrees) -> tuple[Replica, ...]:
        """Replicas of these devices by their first: of those that are alike as many of the degree of their
        type as there are, then of a half, a quarter, ... of it."""
        if not degrees:
            return tuple((device,) for device in devices)
        most = dict(degrees)
        alike: dict[object, list[int]] = {}
        for device in devices:
            alike.setdefault(self._alike[device], []).append(device)
        replicas = []
        for own in alike.values():
            degree, start = most.get(self._alike[own[0]][1], 1), 0
            while start < len(own):
                while degree > len(own) - start:
                    degree //= 2
                replicas.append(tuple(own[start : start + degree]))
                start += degree
        return tuple(sorted(replicas))

    def _find_most(self, devices: tuple[int, ...]) -> Mapping[str, int]:
        """By type of these devices, of those of which replicas may have several, how many at most."""
        most: dict[str, int] = {}
        numbers: dict[tuple[int, str, int | None], int] = {}
        for key in map(self._alike.__getitem__, devices):
            numbers[key] = numbers.get(key, 0) + 1
        for (_, device, _), number in numbers.items():
            largest = max(degree for degree in DEGREES if degree <= min(number, self._most))
            most[device] = max(most.get(device, 1), largest)
        return {device: number for device, number in most.items() if number > 1}

    def limit(self, devices: tuple[int, ...], degree: int) -> Degrees:
        """The degree of each type of these devices that comes nearest to one, and is no more."""
        found = ((device, min(degree, most)) for device, most in self.most_by_type(devices).items())
        return tuple(sorted((device, number) for device, number in found if number > 1))

    def computers(self, replicas: Iterable[Replica]) -> tuple[Computer, ...]:
        """What each of them is."""
        return tuple(map(self._computer, replicas))

    def _computer(self, replica: Replica) -> Computer:
        node, device, _ = self._alike[replica[0]]
        return device if len(replica) == 1 else ReplicaKind(device, len(replica), self._node_kinds[node])

    @cached_property
    def _node_kinds(self) -> list[int]:
        """By node: the first that is the same but for its name, and of which nothing was measured by it."""
        kinds: dict[object, int] = {}
        return [
            kinds.setdefault(replace(node, name=node.name if node.name in self._named else ""), n)
            for n, node in enumerate(self._cluster.nodes)
        ]

    @cached_property
    def _network(self) -> Network:
        return self._make_network()

    def _find_exchange_s(self, kind: ReplicaKind, num_bytes: float) -> float:
        """An all-gather and a reduce-scatter of so many bytes, in as many replicas at once as the node has
        devices for."""
        of_kind = (kind.node, kind.device)
        own = [d for d, (node, device, _) in enumerate(self._alike) if (node, device) == of_kind]
        starts = range(0, len(own) - kind.degree + 1, kind.degree)
        return time_exchange(self._network, [own[s : s + kind.degree] for s in starts], num_bytes)


def find_degrees(replicas: Sequence[Replica]) -> tuple[int, ...]:
    """Devices of each replica; nothing where all are single devices."""
    degrees = tuple(map(len, replicas))
    return degrees if max(degrees) > 1 else ()
