"""Proves a cluster consistent: names, device types, numbers within reason, devices of a node connected.

Nodes need not all be: what exchanges data without a link is refused where a plan is costed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from zorselike.errors import ClusterError
from zorselike.plan.cluster.device_types import require_device_type
from zorselike.plan.cluster.parts import Link, Node, Rate
from zorselike.text.annotations import Quantity
from zorselike.text.dataclass_tables import check_dataclass, check_value
from zorselike.text.wording import count, suggest

if TYPE_CHECKING:
    from zorselike.plan.cluster.cluster import Cluster

Pair = tuple[str, str]


def validate_cluster(cluster: Cluster) -> None:
    """Raises `ClusterError` or `FileError` at the first thing that is wrong, naming node or link and mend."""
    if not cluster.nodes:
        raise ClusterError("the cluster has no nodes; add a [[nodes]] with a name and its devices")
    for node in cluster.nodes:
        _validate_node(node)
    for name, times in Counter(node.name for node in cluster.nodes).items():
        if times > 1:
            raise ClusterError(f"{count(times, 'node')} have the name {name!r}; give each a name of its own")
    _validate_zones(cluster.nodes)
    nodes = [node.name for node in cluster.nodes]
    zones = list(dict.fromkeys(node.zone for node in cluster.nodes if node.zone))
    regions = list(dict.fromkeys(node.region for node in cluster.nodes if node.region))
    _validate_links(cluster.node_links, "node", nodes)
    _validate_links(cluster.zone_links, "zone", zones)
    _validate_links(cluster.region_links, "region", regions)
    if cluster.default_link is not None:
        _validate_link(cluster.default_link, "default_link")
    for pair, rate in cluster.shared_links.items():
        _require_pair(pair, "region or zone", [*regions, *zones])
        check_value(Rate, rate, f"total of {pair[0]} and {pair[1]}")
    for pair, price in cluster.egress_price_per_gb.items():
        for name in pair:
            _require_name(name, "an egress price", "zone or region", [*zones, *regions])
        check_value(Quantity, price, f"egress from {pair[0]} to {pair[1]}: price_per_gb")


def _validate_node(node: Node) -> None:
    where = f"node {node.name}: " if node.name and node.name.isprintable() else "a node's "
    check_dataclass(node, where)
    if "{}" in node.name:
        raise ClusterError(f"{where}{{}} in its name is for copies; add copies or take it out")
    for type in node.devices:
        try:
            require_device_type(type)
        except ClusterError as error:
            raise ClusterError(f"{where}{error}") from None
    if node.memory_bytes and len(node.memory_bytes) != len(node.devices):
        raise ClusterError(
            f"{where}device_memory has {count(len(node.memory_bytes), 'size')} for "
            f"{count(len(node.devices), 'device')}; give one for each, or one size for all"
        )
    for key, link in (("host_link", node.host_link), ("fabric", node.fabric), ("nic", node.nic)):
        if link is not None:
            _validate_link(link, f"{where}{key}")
    if len(node.devices) > 1 and node.fabric is None:
        raise ClusterError(
            f"{where}nothing says how its {len(node.devices)} devices are connected; give it a fabric with "
            "bandwidth and latency"
        )


def _validate_zones(nodes: Sequence[Node]) -> None:
    """A zone lies in one region; a name that is both means one set of nodes."""
    region_of: dict[str, Node] = {}
    for node in nodes:
        if not node.zone:
            continue
        first = region_of.setdefault(node.zone, node)
        if first.region != node.region:
            raise ClusterError(
                f"zone {node.zone} is in {_name_region(first)} for node {first.name} and in "
                f"{_name_region(node)} for node {node.name}; give both the same region"
            )
    for node in nodes:
        if node.region in region_of and region_of[node.region].region != node.region:
            raise ClusterError(
                f"{node.region!r} is a region (node {node.name}) and a zone of another region (node "
                f"{region_of[node.region].name}); give one of them another name"
            )


def _name_region(node: Node) -> str:
    return f"region {node.region}" if node.region else "no region"


def _validate_links(links: Mapping[Pair, Link], noun: str, names: Sequence[str]) -> None:
    for pair, link in links.items():
        _require_pair(pair, noun, names)
        _validate_link(link, f"link of {noun}s {pair[0]} and {pair[1]}: ")
        if noun == "node" and pair[0] == pair[1]:
            raise ClusterError(
                f"link of nodes {pair[0]} and {pair[0]}: it joins a node with itself; what joins the "
                "devices inside a node is its fabric"
            )


def _validate_link(link: Link, where: str) -> None:
    check_dataclass(link, where)
    for (size, _), (after, _) in pairwise(link.points):
        if after <= size:
            raise ClusterError(
                f"{where} points have {after:g} bytes after {size:g}; list them by rising size, each once"
            )


def _require_pair(pair: Pair, noun: str, names: Sequence[str]) -> None:
    for name in pair:
        _require_name(name, "a link", noun, names)
    if pair[0] > pair[1]:
        raise ClusterError(f"the link of {pair} is looked up as {pair[::-1]}; write the names in that order")


def _require_name(name: str, user: str, noun: str, names: Sequence[str]) -> None:
    if name not in names:
        known = f"; there are {', '.join(names)}" if names else f"; give nodes their {noun}"
        hint = suggest(name, names) or known
        raise ClusterError(f"{user} names the {noun} {name!r}, which does not exist{hint}")
