"""Nodes by what tells them apart, so that a choice of devices is so many nodes of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zorselike.planner.groups.bandwidths import Bandwidths


@dataclass(frozen=True)
class NodeKind:
    """Nodes that nothing but their names and links tells apart."""

    nodes: tuple[tuple[int, ...], ...]
    """Devices of each that may be used, fastest first; the first nodes are joined best to each other."""
    types: tuple[str, ...]
    """Types of one node's devices, in that order."""
    price_per_hour: float
    """Price of a node."""

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for node in self.nodes for device in node)


def find_node_kinds(
    bandwidths: Bandwidths, devices: Iterable[int], model_s: Callable[[str], float]
) -> tuple[NodeKind, ...]:
    """The kinds of the nodes that have these devices, those first that have the fastest devices.

    Args:
        bandwidths: of all of the devices.
        devices: indices into `Cluster.places`.
        model_s: seconds of one row on a device of a type, by which devices are ordered.
    """
    cluster = bandwidths.cluster
    by_node: dict[int, list[int]] = {}
    for device in sorted(devices):
        by_node.setdefault(cluster.places[device].node, []).append(device)
    alike: dict[object, list[int]] = {}
    for node, on_node in by_node.items():
        ranks = tuple(cluster.places[device].local_rank for device in on_node)
        alike.setdefault((replace(cluster.nodes[node], name=""), ranks), []).append(node)

    def type_of(device: int) -> str:
        return cluster.device_type(cluster.places[device])

    kinds = []
    for numbers in alike.values():
        ordered = _order_nodes(bandwidths, numbers)
        nodes = tuple(tuple(sorted(by_node[n], key=lambda d: model_s(type_of(d)))) for n in ordered)
        kinds.append(NodeKind(nodes, tuple(map(type_of, nodes[0])), cluster.nodes[numbers[0]].price_per_hour))
    return tuple(sorted(kinds, key=lambda kind: model_s(kind.types[0])))


def _order_nodes(bandwidths: Bandwidths, nodes: Sequence[int]) -> list[int]:
    """Each next one is joined best to those before: where it is equal, the order of the cluster."""
    first_block = {block.node: b for b, block in reversed([*enumerate(bandwidths.blocks)])}
    at = [first_block[node] for node in nodes]
    rates = bandwidths.rates[np.ix_(at, at)].copy()
    np.fill_diagonal(rates, np.inf)
    if len(nodes) < 3 or len(np.unique(rates)) <= 2:
        return list(nodes)
    np.fill_diagonal(rates, 0.0)
    taken = [int(rates.sum(axis=1).argmax())]
    slowest = rates[taken[0]].copy()
    free = np.ones(len(nodes), dtype=bool)
    while True:
        free[taken[-1]] = False
        if not free.any():
            return [nodes[i] for i in taken]
        slowest = np.minimum(slowest, rates[taken[-1]])
        taken.append(int(np.where(free, slowest, -1.0).argmax()))
