"""The groups that a person would make: devices that have a name in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from zorselike.plan.cluster.cluster import Node
from zorselike.planner.groups.bandwidths import Bandwidths, Partition, sort_groups

_COMMON: dict[str, Callable[[Node, str], Hashable]] = {
    "one group": lambda node, type: (),
    "by region": lambda node, type: node.region,
    "by zone": lambda node, type: (node.region, node.zone),
    "by device type": lambda node, type: type,
    "by region and device type": lambda node, type: (node.region, type),
    "by zone and device type": lambda node, type: (node.region, node.zone, type),
    "by kind of node": lambda node, type: _kind(node),
    "by region and kind of node": lambda node, type: (node.region, _kind(node)),
    "by zone and kind of node": lambda node, type: (node.region, node.zone, _kind(node)),
    "by node": lambda node, type: node.name,
    "by node and device type": lambda node, type: (node.name, type),
}
"""What the devices of a group have in common, from the coarse to the fine."""


def group_naturally(bandwidths: Bandwidths) -> dict[str, Partition]:
    """Partitions by what devices have in common, each under the first name that yields it, without those
    that have devices in one group that may not be."""
    found: dict[Partition, str] = {}
    for name, common in _COMMON.items():
        groups: dict[Hashable, list[int]] = {}
        for block in bandwidths.blocks:
            key = common(bandwidths.cluster.nodes[block.node], block.type)
            groups.setdefault(key, []).extend(block.devices)
        partition = sort_groups(groups.values())
        if partition not in found and all(bandwidths.slowest_link(group) > 0 for group in partition):
            found[partition] = name
    return {name: partition for partition, name in found.items()}


def _kind(node: Node) -> Hashable:
    """Nodes with the same hardware: the paper's groups of cluster B (Zorse 6.2)."""
    return node.devices, node.memory_bytes, node.fabric, node.fabric_total_bytes_per_s, node.nic
