"""The cluster: nodes with their devices, the links between them, and what they cost.

Plain data, immutable and free of torch. `zorselike/plan/cluster/toml.py` reads and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

from zorselike.errors import ClusterError
from zorselike.plan.cluster.parts import Link, Node, Place, Rate
from zorselike.plan.cluster.placing import place_ranks
from zorselike.plan.cluster.toml import READERS, describe_cluster, format_cluster, read_links
from zorselike.plan.cluster.validate import validate_cluster
from zorselike.plan.plan import Plan
from zorselike.text.annotations import Must, Quantity
from zorselike.text.dataclass_tables import read_dataclass, write_dataclass
from zorselike.text.document import Document
from zorselike.text.files import hash_content

__all__ = ["Cluster", "Link", "Node", "Place"]


@dataclass(frozen=True)
class Cluster(Document):
    """What one has, or could rent.

    `Cluster.load(path)` and `cluster.save(path)` read and write TOML; what is wrong is a `ClusterError`.
    """

    noun = "cluster"
    error = ClusterError

    nodes: Annotated[tuple[Node, ...], Must(bool, "add a [[nodes]] with a name and its devices")]
    node_links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    """Links between two nodes, by their names in alphabetical order."""
    zone_links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    """Links between two zones, or inside one (`("a", "a")`), by names in alphabetical order."""
    region_links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    default_link: Link | None = None
    """Link between nodes that no other link names."""
    shared_links: Mapping[tuple[str, str], Rate] = field(default_factory=dict)
    """Bytes per second that all traffic between two regions (or zones) has together, each way."""
    egress_price_per_gb: Mapping[tuple[str, str], Quantity] = field(default_factory=dict)
    """Money per 10^9 bytes from the first zone (or region) to the second; what is missing is free."""
    currency: str = "USD"
    name: str = ""

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
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
    def from_table(cls, table: Mapping[str, Any]) -> Cluster:
        return read_dataclass(cls, table, readers=READERS, extra=("links", "egress"), **read_links(table))

    def to_text(self) -> str:
        return f"# cluster {self.fingerprint}: {describe_cluster(self)}\n{format_cluster(self)}"

    def validate(self) -> Cluster:
        """Returns the cluster itself if it can be; raises `ClusterError` otherwise."""
        with self.errors():
            validate_cluster(self)
        return self

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits that change with anything in it but its name; raises `ClusterError` as
        `validate` does."""
        return hash_content(write_dataclass(replace(self.validate(), name="")))
