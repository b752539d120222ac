"""Candidate groups: partitions, names, regions, sub-groups."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from clusters import CLUSTER_A, CLUSTER_B, make_cluster, small_clusters
from hypothesis import given, settings
from hypothesis import strategies as st

from zorselike.errors import ClusterError, ConfigError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.groups import candidates
from zorselike.planner.groups.bandwidths import Bandwidths, Partition, read_bandwidths, sort_groups
from zorselike.planner.groups.candidates import Grouping, find_groupings
from zorselike.planner.groups.subgroups import list_splits, split_group


def named(groupings: tuple[Grouping, ...]) -> dict[str, Partition]:
    return {name: grouping.groups for grouping in groupings for name in grouping.names}


def keys_of(bandwidths: Bandwidths, groupings: tuple[Grouping, ...]) -> list[object]:
    return [tuple(sorted(map(bandwidths.count_blocks, grouping.groups))) for grouping in groupings]


@settings(max_examples=60)
@given(cluster=small_clusters(), span=st.booleans(), most_blocks=st.sampled_from([1, 512]), data=st.data())
def test_candidates_are_partitions_of_the_devices(
    cluster: Cluster, span: bool, most_blocks: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.integers(0, cluster.num_devices - 1), min_size=1))
    bandwidths = read_bandwidths(cluster, chosen, span_regions=span)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "MOST_BLOCKS", most_blocks)
        groupings = find_groupings(bandwidths, max_groups=16)
    for grouping in groupings:
        devices = [device for group in grouping.groups for device in group]
        assert sorted(devices) == sorted(chosen) and all(grouping.groups)
        assert list(grouping.groups) == sorted(tuple(sorted(group)) for group in grouping.groups)
        assert len(grouping.groups) <= 16 and grouping.names
        regions = [
            {cluster.nodes[cluster.places[device].node].region for device in group}
            for group in grouping.groups
        ]
        assert span or all(len(own) == 1 for own in regions)
    assert [len(grouping.groups) for grouping in groupings] == sorted(len(g.groups) for g in groupings)
    keys = keys_of(bandwidths, groupings)
    assert len(set(keys)) == len(keys)


@settings(max_examples=60)
@given(cluster=small_clusters())
def test_every_number_of_groups_has_a_candidate(cluster: Cluster) -> None:
    counts = {len(grouping.groups) for grouping in find_groupings(read_bandwidths(cluster))}
    num_regions = len({node.region for node in cluster.nodes})
    most = max(len(cluster.nodes), min(cluster.num_devices, 8))
    assert counts == set(range(num_regions, most + 1))


@settings(max_examples=60)
@given(cluster=small_clusters())
def test_allowing_groups_to_span_regions_keeps_what_a_person_would_make(cluster: Cluster) -> None:
    inside, across = read_bandwidths(cluster), read_bandwidths(cluster, span_regions=True)
    named_inside, named_across = find_groupings(inside), find_groupings(across)
    by_person = [g for g in named_inside if g.name.startswith("by ") and "," not in g.name]
    assert set(keys_of(inside, tuple(by_person))) <= set(keys_of(across, named_across))
    assert "one group" in named(named_across)


@settings(max_examples=60)
@given(cluster=small_clusters())
def test_the_same_cluster_has_the_same_candidates(cluster: Cluster) -> None:
    assert find_groupings(read_bandwidths(cluster)) == find_groupings(read_bandwidths(replace(cluster)))


@settings(max_examples=60)
@given(cluster=small_clusters(max_nodes=3))
def test_few_devices_are_grouped_in_every_way(cluster: Cluster) -> None:
    """Bell numbers, once alike devices and nodes are told apart."""
    devices = range(min(cluster.num_devices, 5))
    bandwidths = read_bandwidths(cluster, devices, span_regions=True)
    found = [bandwidths.describe(grouping.groups) for grouping in find_groupings(bandwidths)]

    def ways(rest: list[int]) -> list[Partition]:
        if not rest:
            return [()]
        first, others = rest[0], rest[1:]
        return [
            ((first, *own), *groups)
            for num in range(len(others) + 1)
            for own in combinations(others, num)
            for groups in ways([device for device in others if device not in own])
        ]

    assert len({*found}) == len(found)
    assert {*found} == {bandwidths.describe(sort_groups(groups)) for groups in ways([*devices])}


def test_alike_nodes_are_told_apart_by_their_links_alone() -> None:
    def describe(cluster: Cluster, *groups: tuple[int, ...]) -> object:
        return read_bandwidths(cluster).describe(sort_groups(groups))

    node = Node(name="a", devices=("T4",) * 2, fabric=Link(1e10))
    cluster = Cluster(nodes=(*(replace(node, name=n) for n in "abc"),), default_link=Link(1e9))
    rest = (0, 1), (4, 5)
    assert describe(cluster, (0, 1), (2, 3, 4, 5)) == describe(cluster, (0, 1, 4, 5), (2, 3))
    assert describe(cluster, (0, 1, 2), (3, 4, 5)) != describe(cluster, (0, 2, 4), (1, 3, 5))
    assert describe(cluster, *rest, (2,), (3,)) != describe(cluster, *rest, (2, 3))
    eight = replace(cluster, nodes=(*(replace(own, devices=("T4",) * 8) for own in cluster.nodes),))
    assert describe(eight, (0, 1, 2, 3, 8, 16), (*range(4, 8), *range(9, 16), *range(17, 24))) != describe(
        eight, (0, 1, 2, 8, 9, 10), (*range(3, 8), *range(11, 24))
    )
    faster = replace(cluster, node_links={("a", "b"): Link(2e9)})
    assert describe(faster, (0, 1), (2, 3, 4, 5)) == describe(faster, (0, 1, 4, 5), (2, 3))
    assert describe(faster, (0, 1), (2, 3, 4, 5)) != describe(faster, (0, 1, 2, 3), (4, 5))
    far = replace(cluster, node_links={("a", "b"): Link(1e9, latency_s=0.1)})
    assert describe(far, (0, 1), (2, 3, 4, 5)) == describe(far, (0, 1, 4, 5), (2, 3))
    assert describe(far, (0, 1), (2, 3, 4, 5)) != describe(far, (0, 1, 2, 3), (4, 5))


def test_the_papers_groupings_are_candidates() -> None:
    """Section 6.2: cluster A by node; B by type, and where memory is short 16 V100 as two groups of 8."""
    groups_a = named(find_groupings(read_bandwidths(CLUSTER_A)))
    assert [len(group) for group in groups_a["by node"]] == [2, 2, 8, 8]
    groups_b = named(find_groupings(read_bandwidths(CLUSTER_B)))
    assert [len(group) for group in groups_b["by device type"]] == [8, 16, 16, 24]
    assert [len(group) for group in groups_b["by device type, 16 V100-16 as 2"]] == [8, 16, 8, 8, 24]
    assert [len(g) for g in groups_b["by device type, at most 12 each"]] == [8, 8, 8, 8, 8, 8, 16]
    together = groups_b["by device type, 16 A10G + 16 V100-16 together"]
    assert [len(group) for group in together] == [8, 32, 24]


def test_a_partition_has_all_its_names() -> None:
    found = find_groupings(read_bandwidths(CLUSTER_A))
    nodes = next(grouping for grouping in found if grouping.name == "by node")
    assert "minimum 4-cut" in nodes.names and "merged by bandwidth into 4" in nodes.names
    assert next(g for g in found if len(g.groups) == 1).names == ("one group",)


def two_regions() -> Cluster:
    def node(name: str, type: str, zone: str) -> Node:
        return Node(
            name=name, devices=(type,) * 4, zone=zone, region=zone.partition("-")[0], fabric=Link(100e9)
        )

    return Cluster(
        nodes=(
            node("a", "A100-40", "east-1"),
            node("b", "V100-16", "east-2"),
            node("c", "A100-40", "west-1"),
            node("d", "V100-16", "west-1"),
        ),
        default_link=Link(3e9),
        region_links={("east", "west"): Link(0.2e9)},
    )


def test_groups_stay_in_a_region_unless_they_may_span_it() -> None:
    inside = named(find_groupings(read_bandwidths(two_regions())))
    assert [len(group) for group in inside["by region"]] == [8, 8]
    assert [len(group) for group in inside["by zone"]] == [4, 4, 8]
    assert "by device type" not in inside and "one group" not in inside
    across = named(find_groupings(read_bandwidths(two_regions(), span_regions=True)))
    assert across["by device type"] == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert "one group" in across and across["by region"] == inside["by region"]


def test_a_region_is_too_many_for_so_few_groups() -> None:
    with pytest.raises(ConfigError, match=r"at most 1 group exists: the devices are in 2 regions"):
        find_groupings(read_bandwidths(two_regions()), max_groups=1)


def test_no_devices_are_refused() -> None:
    with pytest.raises(ClusterError, match="no devices"):
        read_bandwidths(CLUSTER_A, [])


def test_unconnected_parts_are_named_and_split_first() -> None:
    cluster = make_cluster(("T4", 3, 2, 10e9))
    joined = replace(cluster, default_link=None, node_links={("T4-0", "T4-2"): Link(1e9)})
    bandwidths = read_bandwidths(joined)
    assert bandwidths.connected_parts() == ((0, 1, 4, 5), (2, 3))
    assert find_groupings(bandwidths)[0].groups == ((0, 1, 4, 5), (2, 3))
    with pytest.raises(ConfigError, match="not all joined"):
        find_groupings(bandwidths, max_groups=1)
    assert read_bandwidths(cluster).connected_parts() == (tuple(range(6)),)


def test_what_bounds_a_pair_is_the_least_on_its_way() -> None:
    fast = Node(name="a", devices=("T4", "T4"), region="x", fabric=Link(9e9), nic=Link(4e9))
    wide = replace(fast, name="b", region="y", nic=Link(8e9), fabric_total_bytes_per_s=7e9)
    cluster = Cluster(nodes=(fast, wide), default_link=Link(5e9))
    assert read_bandwidths(cluster).rates.tolist() == [[9e9, 4e9], [4e9, 7e9]]
    shared = replace(cluster, shared_links={("x", "y"): 2e9})
    assert read_bandwidths(shared).rates[0, 1] == 2e9


def test_regions_without_zones_have_their_own_links() -> None:
    nodes = tuple(Node(name=f"n{i}", devices=("T4",), region=region) for i, region in enumerate("xxy"))
    cluster = Cluster(nodes=nodes, default_link=Link(3e9), region_links={("x", "y"): Link(1e9)})
    assert read_bandwidths(cluster).rates.tolist() == [[0, 3e9, 1e9], [3e9, 0, 1e9], [1e9, 1e9, 0]]


@settings(max_examples=60)
@given(cluster=small_clusters())
def test_bandwidths_are_the_clusters(cluster: Cluster) -> None:
    bandwidths = read_bandwidths(cluster, span_regions=True)
    places = cluster.places
    for a, b in combinations(range(cluster.num_devices), 2):
        rate = bandwidths.rates[bandwidths.block_of[a], bandwidths.block_of[b]]
        assert rate == cluster.link(places[a], places[b]).bandwidth_bytes_per_s
        assert bandwidths.slowest_link((a, b)) == rate


# -- sub-groups -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(cluster=small_clusters(max_regions=1), data=st.data())
def test_sub_groups_are_even_and_of_whole_nodes_where_they_can_be(
    cluster: Cluster, data: st.DataObject
) -> None:
    bandwidths = read_bandwidths(cluster)
    group = bandwidths.devices
    num_parts = data.draw(st.integers(1, len(group)))
    parts = split_group(bandwidths, group, num_parts)
    assert len(parts) == num_parts and sorted(device for part in parts for device in part) == list(group)
    sizes = Counter(cluster.places[device].node for device in group)
    if num_parts <= len(sizes):
        for part in parts:
            assert all(
                num == sizes[node] for node, num in Counter(cluster.places[d].node for d in part).items()
            )
    else:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_sub_groups_divide_nodes_before_devices() -> None:
    bandwidths = read_bandwidths(make_cluster(("T4", 3, 8, 10e9)))
    assert list_splits(bandwidths, bandwidths.devices) == [2, 3, 6, 12, 24]
    alone = read_bandwidths(make_cluster(("T4", 1, 6, 10e9)))
    assert list_splits(alone, alone.devices) == [2, 3, 6]
    assert split_group(alone, alone.devices, 3) == ((0, 1), (2, 3), (4, 5))


def test_four_types_and_a_thousand_devices_have_every_number_of_groups() -> None:
    cluster = make_cluster(
        ("A100-40", 32, 8, 200e9), ("V100-16", 32, 8, 100e9), ("A10G", 32, 8, 20e9), ("T4", 32, 8, 10e9)
    )
    found = find_groupings(read_bandwidths(cluster), max_groups=32)
    assert cluster.num_devices == 1024
    assert {len(grouping.groups) for grouping in found} == set(range(1, 33))
    assert [len(group) for group in named(found)["by device type"]] == [256] * 4


def test_nodes_that_are_alike_are_one_block() -> None:
    nodes = tuple(
        Node(
            name=f"n{i}", devices=("T4",) * 2, region="eu" if i < 3 else "us", fabric=Link(9e9), nic=Link(5e9)
        )
        for i in range(5)
    )
    links = {("n1", "n3"): Link(2e9)}
    cluster = Cluster(nodes=nodes, node_links=links, default_link=Link(1e9))
    coarse = read_bandwidths(cluster, span_regions=True).join_alike()
    assert sorted(block.devices for block in coarse.blocks) == [(0, 1, 4, 5), (2, 3), (6, 7), (8, 9)]
    at = {block.devices: b for b, block in enumerate(coarse.blocks)}
    joined, alone, named = at[0, 1, 4, 5], at[2, 3], at[6, 7]
    assert coarse.rates[joined, joined] == 1e9 and coarse.rates[alone, alone] == 9e9
    assert coarse.rates[alone, named] == coarse.rates[named, alone] == 2e9


def test_planning_imports_nothing_heavy_by_itself() -> None:
    code = "import sys, zorselike.planner; sys.exit(bool({'numpy', 'scipy', 'networkx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
