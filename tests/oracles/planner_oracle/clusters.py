"""Clusters drawn at random: ragged nodes, regions, links of all speeds, prices, parts that nothing joins."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from zorselike.cost.catalogue import find_device
from zorselike.plan.cluster.cluster import Cluster, Link, Node

DOLLARS_PER_HOUR = {
    "T4": 0.35,
    "P100": 1.46,
    "RTX2080Ti": 0.25,
    "V100-16": 2.48,
    "V100-32": 2.86,
    "RTX3090": 0.45,
    "RTX4090": 0.70,
    "A10G": 1.01,
    "L4": 0.71,
    "A6000": 0.80,
    "L40S": 1.86,
    "A100-40": 3.67,
    "A100-80": 5.07,
    "H100-NVL": 7.0,
    "H100-SXM": 11.06,
    "MI250": 2.0,
}
"""Device types that are drawn, and about what one is rented for."""

NODE_SIZES = (1, 2, 3, 4, 5, 6, 8, 8, 8)
FABRICS = (8e9, 10e9, 32e9, 64e9, 200e9, 300e9)
CARDS = (0.125e9, 1.25e9, 3.1e9, 6.25e9, 12.5e9, 50e9)
BETWEEN_REGIONS = (0.04e9, 0.12e9, 0.6e9, 1.2e9)
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of what is drawn."""

    max_devices: int = 64
    max_types: int = 6
    max_regions: int = 3
    max_layers: int = 80
    """Layers of the model, beside embedding and head."""


WIDE = Limits()


def draw_cluster(rng: random.Random, types: Sequence[str], limits: Limits = WIDE) -> Cluster:
    """A cluster of some of the types; one in ten, of several nodes, is in two parts that nothing joins."""
    own = rng.sample(types, min(rng.randint(1, limits.max_types), len(types)))
    regions = [f"region-{i}" for i in range(_draw_few(rng, limits.max_regions))]
    has_prices = rng.random() < 0.4
    host_gib = rng.choice([None, None, (4, 8, 16), (64, 256, 1024)])
    nodes: list[Node] = []
    left = draw_number(rng, limits.max_devices)
    while left:
        size = min(left, rng.choice(NODE_SIZES))
        left -= size
        region = rng.choice(regions)
        nodes.append(_draw_node(rng, len(nodes), size, own, region, has_prices, host_gib))
    return _join(rng, nodes)


def draw_number(rng: random.Random, most: int) -> int:
    """From 1 to `most`, as likely to be small as large."""
    return min(most, int(math.exp(rng.uniform(0.0, math.log(most + 1)))))


def _draw_few(rng: random.Random, most: int) -> int:
    return 1 if rng.random() < 0.5 else rng.randint(1, most)


def _draw_node(
    rng: random.Random,
    number: int,
    size: int,
    types: Sequence[str],
    region: str,
    has_prices: bool,
    host_gib: Sequence[int] | None,
) -> Node:
    is_mixed = rng.random() < 0.15
    devices = tuple(rng.choices(types, k=size)) if is_mixed else (rng.choice(types),) * size
    fabric = Link(rng.choice(FABRICS), rng.choice([0.0, 5e-6]))
    has_own_memory = rng.random() < 0.05
    return Node(
        name=f"n{number}",
        devices=devices,
        memory_bytes=tuple(int(0.9 * memory_of(device)) for device in devices) if has_own_memory else (),
        zone=rng.choice([f"{region}-a", f"{region}-b"]) if rng.random() < 0.3 else "",
        region=region,
        price_per_hour=rng.uniform(0.9, 1.2) * sum(DOLLARS_PER_HOUR[device] for device in devices)
        if has_prices
        else 0.0,
        host_memory_bytes=None if host_gib is None else rng.choice(host_gib) * GIB,
        fabric=fabric if size > 1 else None,
        fabric_total_bytes_per_s=2 * fabric.bandwidth_bytes_per_s if rng.random() < 0.2 else None,
        nic=Link(rng.choice(CARDS)) if rng.random() < 0.8 else None,
    )


def memory_of(device: str) -> int:
    """Device memory by the catalogue, of types that have one."""
    memory_bytes = find_device(device).memory_bytes
    assert memory_bytes is not None
    return memory_bytes


def _join(rng: random.Random, nodes: Sequence[Node]) -> Cluster:
    regions = sorted({node.region for node in nodes})
    pairs = list(combinations(regions, 2))
    between = {pair: Link(rng.choice(BETWEEN_REGIONS), rng.uniform(1e-3, 0.08)) for pair in pairs}
    shared = {pair: 2 * link.bandwidth_bytes_per_s for pair, link in between.items() if rng.random() < 0.3}
    prices = {
        way: rng.choice([0.01, 0.02, 0.08])
        for pair in pairs
        for way in (pair, pair[::-1])
        if rng.random() < 0.5
    }
    usual = Link(rng.choice(CARDS), rng.choice([0.0, 2e-5, 2e-4]))
    common = Cluster(
        nodes=tuple(nodes),
        region_links=between,
        default_link=usual,
        egress_price_per_gb=prices,
        name="random",
    )
    if len(nodes) > 1 and rng.random() < 0.1:
        return _divide(rng, common)
    return Cluster(
        nodes=common.nodes,
        node_links=_draw_node_links(rng, nodes),
        region_links=between,
        default_link=usual,
        shared_links=shared,
        egress_price_per_gb=prices,
        name=common.name,
    ).validate()


def _draw_node_links(rng: random.Random, nodes: Sequence[Node]) -> dict[tuple[str, str], Link]:
    """Better or worse ones between some nodes of a region, in some clusters."""
    if rng.random() < 0.7:
        return {}
    return {
        _name_pair(a, b): Link(rng.choice(CARDS), 1e-5)
        for a, b in combinations(nodes, 2)
        if a.region == b.region and rng.random() < 0.3
    }


def _divide(rng: random.Random, cluster: Cluster) -> Cluster:
    """The same nodes in two parts: links between nodes of one part only. `validate` refuses such a one."""
    order = list(cluster.nodes)
    rng.shuffle(order)
    cut = rng.randint(1, len(order) - 1)
    pairs = [pair for part in (order[:cut], order[cut:]) for pair in combinations(part, 2)]
    place = {node.name: place for place in cluster.places for node in [cluster.nodes[place.node]]}
    return Cluster(
        nodes=cluster.nodes,
        node_links={_name_pair(a, b): cluster.link(place[a.name], place[b.name]) for a, b in pairs},
        name=cluster.name,
    )


def _name_pair(a: Node, b: Node) -> tuple[str, str]:
    return min(a.name, b.name), max(a.name, b.name)
