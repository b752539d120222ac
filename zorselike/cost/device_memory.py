"""How much memory a device has, as far as a cluster or the catalogue says."""

from __future__ import annotations

from zorselike.cost.catalogue import find_device
from zorselike.errors import ClusterError
from zorselike.plan.cluster.cluster import Cluster, Place

CPU = "CPU"
"""The device type whose thread computes by itself."""


def find_memory_bytes(cluster: Cluster, place: Place) -> int | None:
    """Of one device: what its node says, else the catalogue; None where neither does. CPU ranks divide their
    host's memory."""
    node, device = cluster.nodes[place.node], cluster.device_type(place)
    if node.memory_bytes:
        return node.memory_bytes[place.local_rank]
    if device == CPU:
        return None if node.host_memory_bytes is None else node.host_memory_bytes // node.devices.count(CPU)
    try:
        return find_device(device).memory_bytes
    except ClusterError:
        return None  # Measured on, but in no catalogue.
