"""What Zorse's paper says of its evaluation (section 6): clusters, groups, results, as in `paper.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zorselike.plan.cluster.cluster import Cluster, Link, Node

GBIT = 1e9 / 8
GB = 1e9
BETWEEN_REGIONS_BYTES_PER_S = 5 * GBIT
CONTEXT_BYTES = 1_000_000_000
"""Memory of every GPU for the CUDA context and libraries: an assumption."""
TOKENS_PER_STEP = 2**20
"""Global batch (section 6.1: one million tokens)."""

TABLES: Mapping[str, Any] = tomllib.loads((Path(__file__).parent / "paper.toml").read_text(encoding="utf-8"))
ASSUMPTIONS: tuple[str, ...] = tuple(TABLES["assumptions"])
PEAK_TFLOPS = {device: float(own["peak_tflops"]) for device, own in TABLES["devices"].items()}


@dataclass(frozen=True)
class Result:
    """A cell of Table 5."""

    tflops: float
    hfu: float
    others: Mapping[str, float | None]
    """TFLOP/s of the other systems; None: out of memory."""
    ministages: int | None
    """Ministages of each GPU; None: the paper does not say, and they are searched."""


def _read_result(cell: Mapping[str, Any]) -> Result:
    others = {name: value for name, value in cell.items() if name not in ("zorse", "ministages")}
    known = {name: None if value == "OOM" else float(value) for name, value in others.items()}
    tflops, hfu = cell["zorse"]
    return Result(tflops, hfu, known, cell.get("ministages"))


TABLE_5 = {
    (c, model): _read_result(own) for c, row in TABLES["table_5"].items() for model, own in row.items()
}
"""By cluster and model."""


@dataclass(frozen=True)
class PaperCluster:
    """One of the three clusters and how Zorse divides it."""

    name: str
    cluster: Cluster
    sequence_length: int
    groups: tuple[tuple[int, ...], ...]
    """Nodes of each group (section 6.2)."""

    @property
    def peak_tflops(self) -> float:
        """The denominator of HFU."""
        return sum(PEAK_TFLOPS[device] for node in self.cluster.nodes for device in node.devices)

    @property
    def types(self) -> tuple[str, ...]:
        """Types of its devices."""
        return tuple(sorted({device for node in self.cluster.nodes for device in node.devices}))

    @property
    def global_batch(self) -> int:
        """Rows of a step."""
        return TOKENS_PER_STEP // self.sequence_length


def make_nodes(
    count: int, device: str, num_devices: int, *, nic: float, region: str = "", start: int = 0
) -> list[Node]:
    """Equal nodes, named by device and number."""
    fabric = Link(TABLES["devices"][device]["fabric_gb_per_s"] * GB)
    return [
        Node(
            name=f"{device.lower()}-{start + i}",
            devices=(device,) * num_devices,
            region=region,
            fabric=fabric,
            nic=Link(nic),
        )
        for i in range(count)
    ]


def make_cluster(name: str, nodes: list[Node], *, nic: float) -> Cluster:
    """Nodes that reach each other at their network cards' rate, in another region at that of regions."""
    regions = sorted({node.region for node in nodes})
    region_links = {
        (a, b): Link(BETWEEN_REGIONS_BYTES_PER_S) for i, a in enumerate(regions) for b in regions[i + 1 :]
    }
    return Cluster(nodes=tuple(nodes), region_links=region_links, default_link=Link(nic), name=name)


def make_clusters() -> dict[str, PaperCluster]:
    """Table 4's clusters with the groups of section 6.2, by name."""
    found = {}
    for name, own in TABLES["clusters"].items():
        nic, nodes = own["nic_gbit"] * GBIT, list[Node]()
        for count, device, size, region in own["nodes"]:
            start = sum(node.devices[0] == device for node in nodes)
            nodes += make_nodes(count, device, size, nic=nic, region=region, start=start)
        cluster = make_cluster(name, nodes, nic=nic)
        found[name] = PaperCluster(name, cluster, own["sequence_length"], tuple(map(tuple, own["groups"])))
    return found


def keep_types(paper: PaperCluster, types: set[str]) -> PaperCluster:
    """The cluster's nodes and groups of some types of GPUs."""
    nodes = [n for n, node in enumerate(paper.cluster.nodes) if set(node.devices) <= types]
    number = {old: new for new, old in enumerate(nodes)}
    cluster = replace(paper.cluster, nodes=tuple(paper.cluster.nodes[n] for n in nodes))
    groups = tuple(tuple(number[n] for n in group) for group in paper.groups if set(group) <= set(nodes))
    return replace(paper, cluster=cluster, groups=groups)


def intra_bandwidth(cluster: Cluster, nodes: tuple[int, ...]) -> float:
    """Mean bytes per second over the pairs of a group's devices, by which Zorse orders groups (4.3.3)."""
    places = [place for place in cluster.places if place.node in nodes]
    pairs = [(a, b) for i, a in enumerate(places) for b in places[i + 1 :]]
    if not pairs:
        return float("inf")
    return sum(cluster.link(a, b).bandwidth_bytes_per_s for a, b in pairs) / len(pairs)
