"""Tensor-parallel replicas of systems that have them: groups of devices cut into replicas inside nodes, in
each node of one degree."""

from __future__ import annotations

from collections.abc import Sequence

from zorselike.cost.network import Network
from zorselike.cost.replica_times import time_exchange
from zorselike.cost.wires import make_network
from zorselike.plan.cluster.cluster import Cluster, Place
from zorselike.simulator.inputs import SimulationInputs

Members = tuple[Place, ...]
"""The devices of a replica."""

Shape = tuple[tuple[Members, ...], ...]
"""The replicas of each group."""


class Exchanges:
    """What collectives inside replicas take, each found once for all shapes of replicas."""

    def __init__(self, inputs: SimulationInputs) -> None:
        self._inputs = inputs
        self._networks: dict[tuple[Place, ...], Network] = {}
        self._found: dict[tuple[int, int, int, float], float] = {}

    def seconds(self, replicas: Sequence[Members], num_bytes: float) -> float:
        """An all-gather and a reduce-scatter of so many bytes in each of a node's replicas, which are alike,
        at once."""
        key = replicas[0][0].node, len(replicas), len(replicas[0]), num_bytes
        if key not in self._found:
            places = tuple(sorted(place for members in replicas for place in members))
            if places not in self._networks:
                self._networks[places] = make_network(self._inputs.cluster, places, self._inputs.profile)
            rings = [[places.index(place) for place in members] for members in replicas]
            self._found[key] = time_exchange(self._networks[places], rings, num_bytes)
        return self._found[key]


def cut_into_replicas(cluster: Cluster, groups: Sequence[Sequence[Place]], degree: int) -> Shape:
    """Groups of devices as groups of replicas.

    Args:
        degree: a power of two. A node's replicas are of the most devices, `degree` or a half, a quarter, ...
            of it, for which each group's part of the node divides into replicas of one type of device.
    """
    parts = [_by_node(group) for group in groups]
    degrees = {
        node: _find_degree(cluster, [part[node] for part in parts if node in part], degree)
        for node in {place.node for group in groups for place in group}
    }
    return tuple(
        tuple(
            tuple(places[start : start + degrees[node]])
            for node, places in part.items()
            for start in range(0, len(places), degrees[node])
        )
        for part in parts
    )


def _by_node(group: Sequence[Place]) -> dict[int, list[Place]]:
    found: dict[int, list[Place]] = {}
    for place in group:
        found.setdefault(place.node, []).append(place)
    return found


def _find_degree(cluster: Cluster, parts: Sequence[Sequence[Place]], degree: int) -> int:
    alike = all(len({cluster.device_type(place) for place in part}) == 1 for part in parts)
    while degree > 1 and not (alike and all(len(part) % degree == 0 for part in parts)):
        degree //= 2
    return degree
