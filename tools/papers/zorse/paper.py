"""What Zorse's paper says of its evaluation: clusters, groups, results (section 6; Tables 3 to 5).

The bandwidths are assumptions, since the paper gives them as a picture (Fig. 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zorselike.plan.cluster.cluster import Cluster, Link, Node

GBIT = 1e9 / 8
GB = 1e9

FABRIC_BYTES_PER_S: Mapping[str, float] = {
    "H100-NVL": 200 * GB,
    "A100-80": 200 * GB,
    "A100-40": 200 * GB,
    "V100-16": 130 * GB,
    "A10G": 10 * GB,
    "T4": 10 * GB,
}
"""Between two devices of a node: NVSwitch, NVLink, PCIe."""

BETWEEN_REGIONS_BYTES_PER_S = 5 * GBIT
CONTEXT_BYTES = 1_000_000_000
"""Memory of every GPU for the CUDA context and libraries: an assumption."""
TOKENS_PER_STEP = 2**20
"""Global batch (section 6.1: one million tokens)."""

PEAK_TFLOPS: Mapping[str, float] = {
    "H100-NVL": 835,
    "A100-80": 312,
    "A100-40": 312,
    "T4": 65,
    "A10G": 125,
    "V100-16": 112,
}
"""Peaks of which Table 5's HFU is the share: solved from the table's throughput and HFU, it has 8332 TFLOP/s
for cluster A, 7848 for B and 10032 for C, which are 835 for an H100-NVL, 312 for an A100, 65 for a T4 and
237 for an A10G and a V100 together, divided here as 125 (Table 3) and 112 (the V100's PCIe card). Table 3's
989 for the H100 and Table 4's sums for B (8112) and C (8240) do not agree with that and are not used."""


@dataclass(frozen=True)
class PaperCluster:
    """One of the three clusters and how Zorse divides it."""

    name: str
    cluster: Cluster
    sequence_length: int
    groups: tuple[tuple[int, ...], ...]
    """Nodes of each group (section 6.2)."""
    peak_tflops: float
    """The denominator of HFU."""

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
    return [
        Node(
            name=f"{device.lower()}-{start + i}",
            devices=(device,) * num_devices,
            region=region,
            fabric=Link(FABRIC_BYTES_PER_S[device]),
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
    return {cluster.name: cluster for cluster in (_make_a(), _make_b(), _make_c())}


def _make_a() -> PaperCluster:
    """Two nodes of two H100s, two of eight A100s; a group a node."""
    nic = 50 * GBIT
    nodes = make_nodes(2, "H100-NVL", 2, nic=nic) + make_nodes(2, "A100-80", 8, nic=nic)
    return _finish("A", nodes, nic, 4096, ((0,), (1,), (2,), (3,)))


def _make_b() -> PaperCluster:
    """A group for each type of GPU."""
    nic = 25 * GBIT
    nodes = (
        make_nodes(1, "A100-40", 8, nic=nic)
        + make_nodes(2, "A10G", 8, nic=nic)
        + make_nodes(2, "V100-16", 8, nic=nic)
        + make_nodes(3, "T4", 8, nic=nic)
    )
    return _finish("B", nodes, nic, 1024, ((0,), (1, 2), (3, 4), (5, 6, 7)))


def _make_c() -> PaperCluster:
    """All A10Gs in a group, each node of V100s by itself, the T4s of each region in two groups of 24."""
    nic = 25 * GBIT
    nodes = (
        make_nodes(2, "A10G", 8, nic=nic, region="east-1")
        + make_nodes(6, "T4", 8, nic=nic, region="east-1")
        + make_nodes(2, "V100-16", 8, nic=nic, region="east-2")
        + make_nodes(6, "T4", 8, nic=nic, region="east-2", start=6)
    )
    groups = ((0, 1), (8,), (9,), (2, 3, 4), (5, 6, 7), (10, 11, 12), (13, 14, 15))
    return _finish("C", nodes, nic, 512, groups)


def _finish(
    name: str, nodes: list[Node], nic: float, sequence_length: int, groups: tuple[tuple[int, ...], ...]
) -> PaperCluster:
    cluster = make_cluster(name, nodes, nic=nic)
    return PaperCluster(name, cluster, sequence_length, groups, sum_peaks(cluster))


def sum_peaks(cluster: Cluster) -> float:
    """TFLOP/s of all devices."""
    return sum(PEAK_TFLOPS[device] for node in cluster.nodes for device in node.devices)


def keep_types(paper: PaperCluster, types: set[str]) -> PaperCluster:
    """The cluster's nodes and groups of some types of GPUs."""
    nodes = [n for n, node in enumerate(paper.cluster.nodes) if set(node.devices) <= types]
    number = {old: new for new, old in enumerate(nodes)}
    cluster = replace(paper.cluster, nodes=tuple(paper.cluster.nodes[n] for n in nodes))
    groups = tuple(tuple(number[n] for n in group) for group in paper.groups if set(group) <= set(nodes))
    return replace(paper, cluster=cluster, groups=groups, peak_tflops=sum_peaks(cluster))


@dataclass(frozen=True)
class Result:
    """A cell of Table 5."""

    tflops: float
    hfu: float


TABLE_5: Mapping[tuple[str, str], Result] = {
    ("A", "7b"): Result(4370.56, 0.5246),
    ("A", "13b"): Result(4917.87, 0.5902),
    ("A", "33b"): Result(5281.64, 0.6339),
    ("A", "65b"): Result(5239.13, 0.6288),
    ("B", "7b"): Result(3412.88, 0.4349),
    ("B", "13b"): Result(2965.64, 0.3779),
    ("B", "33b"): Result(2658.29, 0.3387),
    ("C", "7b"): Result(3936.94, 0.3924),
    ("C", "13b"): Result(3357.97, 0.3347),
    ("C", "33b"): Result(1548.60, 0.1544),
}
"""Zorse's columns, by cluster and model."""

MINISTAGES: Mapping[tuple[str, str], int] = {("B", "13b"): 4, ("B", "33b"): 6}
"""Ministages of each GPU where the paper names them (section 6.2); elsewhere they are searched."""

ASSUMPTIONS = (
    "bandwidths: NVSwitch 200 GB/s in nodes of A100 and H100, NVLink 130 in nodes of V100, PCIe 10 in nodes "
    "of A10G and T4; network cards 50 Gb/s in cluster A, 25 in B and C; 5 Gb/s for each pair of nodes in two "
    "regions; no latency (the paper's Fig. 2 is a picture)",
    "copies between GPU and host at four fifths of the catalogue's bus; 1 GB of every GPU for CUDA",
    "HFU is the share of 8332, 7848 and 10032 TFLOP/s (A, B, C), which Table 5 itself gives: H100-NVL 835, "
    "A100 312, T4 65, A10G 125 and V100 112; not Table 3's 989 nor Table 4's sums",
    "FLOPs hold the recomputed forward, as HFU does: of a layer four forwards with whole attention, of a "
    "head three",
    "layer times at two rows and 4096 tokens that look typed in by hand are left out and interpolated over",
    "memory: gradients of the ministage in hand in fp32, optimizer state 12 bytes a parameter over the "
    "group; what was sent is freed once it is gone",
)


def intra_bandwidth(cluster: Cluster, nodes: tuple[int, ...]) -> float:
    """Mean bytes per second over the pairs of a group's devices, by which Zorse orders groups (4.3.3)."""
    places = [place for place in cluster.places if place.node in nodes]
    pairs = [(a, b) for i, a in enumerate(places) for b in places[i + 1 :]]
    if not pairs:
        return float("inf")
    return sum(cluster.link(a, b).bandwidth_bytes_per_s for a, b in pairs) / len(pairs)
