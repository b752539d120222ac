"""Clusters for tests of groups: small ones at random, and those of the Zorse paper."""

from __future__ import annotations

from hypothesis import strategies as st

from zorselike.plan.cluster.cluster import Cluster, Link, Node


@st.composite
def small_clusters(draw: st.DrawFn, max_nodes: int = 4, max_regions: int = 3) -> Cluster:
    """Ragged nodes, some with two types; links from few values, so that some are alike."""
    rates = st.sampled_from([1e9, 2e9, 5e9, 40e9])
    nodes = []
    for i in range(draw(st.integers(1, max_nodes))):
        types = draw(st.lists(st.sampled_from(["A100-40", "T4"]), min_size=1, max_size=4))
        region = draw(st.integers(0, max_regions - 1))
        nodes.append(
            Node(
                name=f"n{i}",
                devices=tuple(types),
                region=f"r{region}",
                zone=draw(st.sampled_from(["", f"r{region}-a", f"r{region}-b"])),
                fabric=Link(draw(rates)),
            )
        )
    links = {
        (a.name, b.name): Link(draw(rates))
        for i, a in enumerate(nodes)
        for b in nodes[i + 1 :]
        if draw(st.booleans())
    }
    return Cluster(
        nodes=tuple(nodes),
        node_links=links,
        region_links={("r0", "r1"): Link(draw(rates))},
        default_link=Link(1e9),
    )


def make_cluster(*kinds: tuple[str, int, int, float], between: float = 1e9) -> Cluster:
    """`(type, nodes, devices a node, fabric in bytes/s)` of each kind of node."""
    return Cluster(
        nodes=tuple(
            Node(name=f"{type}-{i}", devices=(type,) * size, fabric=Link(fabric))
            for type, num_nodes, size, fabric in kinds
            for i in range(num_nodes)
        ),
        default_link=Link(between),
    )


CLUSTER_A = make_cluster(("H100-NVL", 2, 2, 600e9), ("A100-80", 2, 8, 300e9), between=6.25e9)
"""Table 4 of the paper; the bandwidths inside nodes are assumed."""
CLUSTER_B = make_cluster(
    ("A100-40", 1, 8, 200e9), ("A10G", 2, 8, 10e9), ("V100-16", 2, 8, 100e9), ("T4", 3, 8, 10e9)
)
