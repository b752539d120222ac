"""Nodes by what tells them apart, so that a choice of devices is so many nodes of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zorselike.planner.groups.bandwidths import Bandwidths
from zorselike.text.wording import list_few


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Nodes that nothing but their names and links tells apart."""

    label: str
    """`A100-40 in us-east`."""
    names: tuple[str, ...]
    """Names of its nodes."""
    nodes: tuple[tuple[int, ...], ...]
    """Devices of each that may be used, fastest first; the first nodes are joined best to each other."""
    types: tuple[str, ...]
    """Types of one node's devices, in that order."""
    node_size: int
    """Devices of a node, those that may not be used included."""
    price_per_hour: float
    """Price of a node."""
    zone: str
    region: str

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for node in self.nodes for device in node)

    def describe(self, num_nodes: int) -> str:
        """`3 of 8 nodes of 4 A100-40 in us-east`, `node a`."""
        if len(self.nodes) == 1:
            return f"node {self.names[0]}"
        return (
            f"{'all' if num_nodes == len(self.nodes) else f'{num_nodes} of'} {len(self.nodes)} {self.label}"
        )

    def describe_all(self) -> str:
        """`the 8 nodes of 4 A100-40 in us-east`, `node a`."""
        return f"node {self.names[0]}" if len(self.nodes) == 1 else f"the {len(self.nodes)} {self.label}"

    def describe_one(self) -> str:
        """`one of the 8 nodes of 4 A100-40 in us-east`, `node a`."""
        return self.describe_all() if len(self.nodes) == 1 else f"one of {self.describe_all()}"


def count_types(types: Iterable[str]) -> str:
    """`4 A100-40 and 2 T4`."""
    return list_few(f"{number} {device}" for device, number in Counter(types).items())


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
        key = (
            replace(cluster.nodes[node], name=""),
            tuple(cluster.places[device].local_rank for device in on_node),
        )
        alike.setdefault(key, []).append(node)

    def speed(device: int) -> float:
        return model_s(cluster.device_type(cluster.places[device]))

    kinds = []
    for numbers in alike.values():
        first = cluster.nodes[numbers[0]]
        ordered = _order_nodes(bandwidths, numbers)
        members = tuple(tuple(sorted(by_node[n], key=speed)) for n in ordered)
        types = tuple(cluster.device_type(cluster.places[device]) for device in members[0])
        kinds.append(
            NodeKind(
                label=f"nodes of {count_types(types)}",
                names=tuple(cluster.nodes[n].name for n in ordered),
                nodes=members,
                types=types,
                node_size=len(first.devices),
                price_per_hour=first.price_per_hour,
                zone=first.zone,
                region=first.region,
            )
        )
    return _tell_apart(sorted(kinds, key=lambda kind: model_s(kind.types[0])))


def _tell_apart(kinds: Sequence[NodeKind]) -> tuple[NodeKind, ...]:
    """The same kinds with labels that differ: by zone or region, or else by a node's name."""
    several = len({(kind.region, kind.zone) for kind in kinds}) > 1
    labels = [
        f"{kind.label} in {place}" if several and (place := kind.zone or kind.region) else kind.label
        for kind in kinds
    ]
    return tuple(
        replace(kind, label=f"{label} like {kind.names[0]}" if labels.count(label) > 1 else label)
        for kind, label in zip(kinds, labels, strict=True)
    )


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
