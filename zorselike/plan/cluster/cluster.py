"""The cluster: nodes with their devices, the links between them, and what they cost.

Plain data, immutable and free of torch. `zorselike/plan/cluster/toml.py` reads and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from zorselike.errors import ClusterError
from zorselike.plan.plan import Plan


@dataclass(frozen=True)
class Link:
    """How fast bytes go one way: a bandwidth and a latency, or a fitted curve."""

    bandwidth_bytes_per_s: float
    """The most that it carries, however many share it."""
    latency_s: float = 0.0
    points: tuple[tuple[float, float], ...] = ()
    """What one transfer of a size reaches, `(bytes, bytes_per_s)` by rising size; empty: the bandwidth.
    Interpolated over the logarithm of the size, constant outside."""

    def rate(self, num_bytes: float) -> float:
        """Bytes per second that one transfer of this size reaches if it is alone, latency not counted."""
        from zorselike.plan.cluster.link_curve import interpolate_rate

        return interpolate_rate(self, num_bytes)

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds of one transfer if it is alone, latency included."""
        return self.latency_s + (num_bytes / self.rate(num_bytes) if num_bytes else 0.0)


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine."""

    name: str
    devices: tuple[str, ...]
    """The type of each device, by local rank: names of the device catalogue (`A100-40`, `T4`)."""
    memory_bytes: tuple[int, ...] = ()
    """Of each device, where it is not the catalogue's."""
    zone: str = ""
    region: str = ""
    price_per_hour: float = 0.0
    """Of the whole node, in the cluster's currency."""
    host_memory_bytes: int | None = None
    """RAM for what is offloaded; None: not known, not limited."""
    host_link: Link | None = None
    """One device's link to the host's memory, each way; None: the catalogue's bus."""
    host_link_both_bytes_per_s: float | None = None
    """What both ways carry together when both are busy; None: each way has its own."""
    fabric: Link | None = None
    """Between two devices of this node; None where there is one device."""
    fabric_total_bytes_per_s: float | None = None
    """What all devices of the node carry at once; None: every device has `fabric` in and out."""
    nic: Link | None = None
    """The node's way out and, of the same size, its way in; None: the links to others bound it alone."""


class Place(NamedTuple):
    """Where a rank is."""

    node: int
    local_rank: int


@dataclass(frozen=True)
class Cluster:
    """What one has, or could rent."""

    nodes: tuple[Node, ...]
    node_links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    """Between two nodes, by their names in alphabetical order."""
    zone_links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    """Between two zones, or inside one (`("a", "a")`), by names in alphabetical order."""
    region_links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    default_link: Link | None = None
    """Between nodes that no other link names."""
    shared_links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Bytes per second that all traffic between two regions (or zones) has together, each way."""
    egress_price_per_gb: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Money per 10^9 bytes from the first zone (or region) to the second; what is missing is free."""
    currency: str = "USD"
    name: str = ""

    @property
    def num_devices(self) -> int:
        return sum(len(node.devices) for node in self.nodes)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """All devices, node by node."""
        return tuple(Place(n, r) for n, node in enumerate(self.nodes) for r in range(len(node.devices)))

    def place_ranks(self, plan: Plan) -> tuple[Place, ...]:
        """Where each rank of a plan is: by its `[[devices]]`, else in the order of `places`.

        Raises:
            ClusterError: A node or device that the plan names is not here, or has another type; or the
                plan has more ranks than the cluster devices.
        """
        from zorselike.plan.cluster.placing import place_ranks

        return place_ranks(self, plan)

    def device_type(self, place: Place) -> str:
        return self.nodes[place.node].devices[place.local_rank]

    def link(self, a: Place, b: Place) -> Link:
        """The link between two devices: the fabric inside a node; else the most special that names the
        two nodes, their zones, their regions; else the default.

        Raises:
            ClusterError: Nothing says how the two are connected.
        """
        first, second = self.nodes[a.node], self.nodes[b.node]
        if a.node == b.node:
            if first.fabric is None:
                raise ClusterError(
                    f"nothing says how the devices of node {first.name} are connected; give the node a fabric"
                )
            return first.fabric
        for links, x, y in (
            (self.node_links, first.name, second.name),
            (self.zone_links, first.zone, second.zone),
            (self.region_links, first.region, second.region),
        ):
            found = links.get((min(x, y), max(x, y)))
            if found is not None and x and y:
                return found
        if self.default_link is not None:
            return self.default_link
        raise ClusterError(
            f"nothing says how nodes {first.name} and {second.name} are connected; "
            "add a [[links]] for the two, for their zones or regions, or a default_link"
        )

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Reads and validates a cluster file; raises `ClusterError` naming file, key and mend."""
        from zorselike.plan.cluster.toml import load_cluster

        return load_cluster(path)

    def save(self, path: str | Path) -> None:
        """Writes the cluster as TOML that `Cluster.load` reads back equal."""
        from zorselike.plan.cluster.toml import save_cluster

        save_cluster(self, path)

    def validate(self) -> Cluster:
        """Returns the cluster itself if it can be; raises `ClusterError` otherwise."""
        from zorselike.plan.cluster.validate import validate_cluster

        validate_cluster(self)
        return self

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits that change with anything in it but its name; raises `ClusterError` as
        `validate` does."""
        from zorselike.plan.cluster.toml import fingerprint

        return fingerprint(self)
