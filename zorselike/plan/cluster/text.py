"""A cluster as the text of a cluster file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.text.toml import format_table
from zorselike.text.units import show_rate, show_size, show_time
from zorselike.text.wording import count

CLUSTER_VERSION = 1


def describe_cluster(cluster: Cluster) -> str:
    """`2 nodes: 8 T4, 4 A100-40`."""
    types = Counter(type for node in cluster.nodes for type in node.devices)
    devices = ", ".join(f"{number} {type}" for type, number in types.items())
    return f"{count(len(cluster.nodes), 'node')}: {devices}"


def format_cluster(cluster: Cluster) -> str:
    """A cluster as TOML; equal clusters give equal texts. Nodes that are alike and numbered in a row are
    one entry."""
    lines = format_table(
        {
            "version": CLUSTER_VERSION,
            "name": cluster.name or None,
            "currency": cluster.currency,
            "default_link": _list_link(cluster.default_link),
        }
    )
    for nodes in _split_alike(cluster.nodes):
        lines += ["", "[[nodes]]", *format_table(_list_nodes(nodes))]
    shared = dict(cluster.shared_links)
    for key, links in (
        ("nodes", cluster.node_links),
        ("zones", cluster.zone_links),
        ("regions", cluster.region_links),
    ):
        for pair, link in sorted(links.items()):
            total = shared.pop(pair, None) if key != "nodes" else None
            values = {key: list(pair), **(_list_link(link) or {}), "total": _show_rate(total)}
            lines += ["", "[[links]]", *format_table(values)]
    zones = {node.zone for node in cluster.nodes}
    for pair, total in sorted(shared.items()):
        key = "zones" if zones.issuperset(pair) else "regions"
        lines += ["", "[[links]]", *format_table({key: list(pair), "total": show_rate(total)})]
    for (source, target), price in sorted(cluster.egress_price_per_gb.items()):
        values = {"from": source, "to": target, "price_per_gb": float(price)}
        lines += ["", "[[egress]]", *format_table(values)]
    return "\n".join(lines) + "\n"


def _list_nodes(nodes: Sequence[Node]) -> dict[str, object]:
    """The keys of nodes that differ only in their numbers."""
    node, copies = nodes[0], len(nodes)
    prefix, number = _split_number(node.name)
    devices = set(node.devices)
    memory = [show_size(num_bytes) for num_bytes in node.memory_bytes]
    return {
        "name": node.name if copies == 1 else f"{prefix}{{}}",
        "copies": copies if copies > 1 else None,
        "first": number if copies > 1 and number else None,
        "device": node.devices[0] if len(devices) == 1 else None,
        "count": len(node.devices) if len(devices) == 1 and len(node.devices) > 1 else None,
        "devices": list(node.devices) if len(devices) > 1 else None,
        "device_memory": (memory[0] if len(set(memory)) == 1 else memory) if memory else None,
        "zone": node.zone or None,
        "region": node.region or None,
        "price_per_hour": float(node.price_per_hour) or None,
        "host_memory": None if node.host_memory_bytes is None else show_size(node.host_memory_bytes),
        "host_link": _list_link(node.host_link),
        "host_link_both": _show_rate(node.host_link_both_bytes_per_s),
        "fabric": _list_link(node.fabric),
        "fabric_total": _show_rate(node.fabric_total_bytes_per_s),
        "nic": _list_link(node.nic),
    }


def _list_link(link: Link | None) -> dict[str, object] | None:
    if link is None:
        return None
    points = [[show_size(size), show_rate(rate)] for size, rate in link.points]
    return {
        "bandwidth": show_rate(link.bandwidth_bytes_per_s),
        "latency": show_time(link.latency_s) if link.latency_s else None,
        "points": points or None,
    }


def _show_rate(bytes_per_s: float | None) -> str | None:
    return None if bytes_per_s is None else show_rate(bytes_per_s)


def _split_alike(nodes: Sequence[Node]) -> list[list[Node]]:
    """Runs of nodes that are equal but for their names, which are numbered one after the other."""
    runs: list[list[Node]] = []
    for node in nodes:
        if runs and _follows(runs[-1][-1], node):
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _follows(before: Node, node: Node) -> bool:
    if replace(before, name=node.name) != node:
        return False
    (prefix, number), (next_prefix, next_number) = _split_number(before.name), _split_number(node.name)
    return prefix == next_prefix and number is not None and next_number == number + 1


def _split_number(name: str) -> tuple[str, int | None]:
    """`v100-` and 7 of `v100-7`; no number where writing it again would not give the name."""
    prefix = name.rstrip("0123456789")
    digits = name[len(prefix) :]
    return (
        (prefix, int(digits)) if digits.isascii() and digits and str(int(digits)) == digits else (name, None)
    )
