"""Proves a cluster consistent: names, device types, numbers within reason, devices of a node connected.

Nodes need not all be: what exchanges data without a link is refused where a plan is costed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from zorselike.errors import ClusterError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.cluster.device_types import require_device_type
from zorselike.text.units import show_rate, show_time
from zorselike.text.wording import count, show_value, suggest

MAX_BYTES_PER_S = 10e12
"""No link is faster; more is a slip of units."""
MAX_LATENCY_S = 10.0
MAX_MEMORY_BYTES = 2**50

Pair = tuple[str, str]


def validate_cluster(cluster: Cluster) -> None:
    """Raises `ClusterError` at the first thing that is wrong; names node or link, key and mend."""
    if not cluster.nodes:
        raise ClusterError("the cluster has no nodes; add a [[nodes]] with a name and its devices")
    for node in cluster.nodes:
        _validate_node(node)
    for name, times in Counter(node.name for node in cluster.nodes).items():
        if times > 1:
            raise ClusterError(f"{count(times, 'node')} have the name {name!r}; give each a name of its own")
    _validate_zones(cluster.nodes)
    _validate_links(cluster)
    _validate_prices(cluster)


# -- nodes -----------------------------------------------------------------------------------


def _validate_node(node: Node) -> None:
    if not node.name:
        raise ClusterError("a node's name is empty; give it its hostname")
    for key in ("name", "zone", "region"):
        if not getattr(node, key).isprintable():
            raise ClusterError(f"a node's {key} is {getattr(node, key)!r}; use printable characters")
    if "{}" in node.name:
        raise ClusterError(f"node {node.name}: {{}} in its name is for copies; add copies or take it out")
    where = f"node {node.name}: "
    if not node.devices:
        raise ClusterError(f"{where}it has no devices; give the type of each, or leave the node out")
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
    for num_bytes in node.memory_bytes:
        _require_memory(num_bytes, f"{where}device_memory")
    if node.host_memory_bytes is not None:
        _require_memory(node.host_memory_bytes, f"{where}host_memory")
    _require_price(node.price_per_hour, f"{where}price_per_hour")
    for key, link in (("host_link", node.host_link), ("fabric", node.fabric), ("nic", node.nic)):
        if link is not None:
            _validate_link(link, f"{where}{key}: ")
    for key, rate in (
        ("host_link_both", node.host_link_both_bytes_per_s),
        ("fabric_total", node.fabric_total_bytes_per_s),
    ):
        if rate is not None:
            _require_rate(rate, f"{where}{key}")
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


# -- links -----------------------------------------------------------------------------------


def _validate_links(cluster: Cluster) -> None:
    nodes = [node.name for node in cluster.nodes]
    zones, regions = zones_of(cluster), regions_of(cluster)
    for links, noun, names in (
        (cluster.node_links, "node", nodes),
        (cluster.zone_links, "zone", zones),
        (cluster.region_links, "region", regions),
    ):
        for pair, link in links.items():
            _require_pair(pair, noun, names)
            _validate_link(link, f"link of {noun}s {pair[0]} and {pair[1]}: ")
            if noun == "node" and pair[0] == pair[1]:
                raise ClusterError(
                    f"link of nodes {pair[0]} and {pair[0]}: it joins a node with itself; what joins the "
                    "devices inside a node is its fabric"
                )
    if cluster.default_link is not None:
        _validate_link(cluster.default_link, "default_link: ")
    for pair, rate in cluster.shared_links.items():
        _require_pair(pair, "region or zone", [*regions, *zones])
        _require_rate(rate, f"total of {pair[0]} and {pair[1]}")


def zones_of(cluster: Cluster) -> list[str]:
    """Names of the zones, in the order of the nodes."""
    return list(dict.fromkeys(node.zone for node in cluster.nodes if node.zone))


def regions_of(cluster: Cluster) -> list[str]:
    """Names of the regions, in the order of the nodes."""
    return list(dict.fromkeys(node.region for node in cluster.nodes if node.region))


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


def _validate_link(link: Link, where: str) -> None:
    _require_rate(link.bandwidth_bytes_per_s, f"{where}bandwidth")
    if not 0 <= link.latency_s <= MAX_LATENCY_S:
        raise ClusterError(
            f"{where}latency is {_show_seconds(link.latency_s)}; it must be from 0s to {MAX_LATENCY_S:g}s, "
            'written with its unit, such as "10us"'
        )
    for size, rate in link.points:
        if not (size > 0 and math.isfinite(size)):
            raise ClusterError(f"{where}points have a size of {size:g} bytes; it must be above 0")
        _require_rate(rate, f"{where}points' bandwidth at {size:g} bytes")
    for (size, _), (after, _) in pairwise(link.points):
        if after <= size:
            raise ClusterError(
                f"{where}points have {after:g} bytes after {size:g}; list them by rising size, each once"
            )


def _require_rate(rate: float, where: str) -> None:
    if rate > MAX_BYTES_PER_S:
        shown = show_rate(rate) if math.isfinite(rate) else f"{rate} bytes/s"
        raise ClusterError(
            f"{where} is {shown}, above {show_rate(MAX_BYTES_PER_S)}, which no link reaches; check its unit: "
            "25Gb/s are bits and 25GB/s bytes"
        )
    if not rate > 0:
        raise ClusterError(f"{where} is {rate:g} bytes/s; it must be above 0")


def _show_seconds(seconds: float) -> str:
    return show_time(seconds) if math.isfinite(seconds) else f"{seconds}s"


def _require_memory(num_bytes: int, where: str) -> None:
    if not 0 < num_bytes <= MAX_MEMORY_BYTES:
        raise ClusterError(f'{where} is {num_bytes} bytes; write what the machine has, such as "256GiB"')


# -- money -----------------------------------------------------------------------------------


def _validate_prices(cluster: Cluster) -> None:
    places = [*zones_of(cluster), *regions_of(cluster)]
    for pair, price in cluster.egress_price_per_gb.items():
        for name in pair:
            _require_name(name, "an egress price", "zone or region", places)
        _require_price(price, f"egress from {pair[0]} to {pair[1]}: price_per_gb")


def _require_price(price: float, where: str) -> None:
    if not (math.isfinite(price) and price >= 0):
        raise ClusterError(f"{where} is {show_value(price)}; it must be a number from 0 up")
