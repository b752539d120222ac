"""Orders of groups: the paper's rule, and every other that is really another."""

from __future__ import annotations

from itertools import permutations

from clusters import CLUSTER_A, CLUSTER_B, make_cluster, small_clusters
from hypothesis import given, settings
from hypothesis import strategies as st

from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.groups.bandwidths import read_bandwidths
from zorselike.planner.groups.candidates import find_groupings
from zorselike.planner.groups.order import find_interchangeable, order_by_bandwidth, order_groups

BY_NODE_A = ((0, 1), (2, 3), tuple(range(4, 12)), tuple(range(12, 20)))
BY_TYPE_B = (tuple(range(8)), tuple(range(8, 24)), tuple(range(24, 40)), tuple(range(40, 64)))


def test_groups_go_by_falling_bandwidth() -> None:
    """A100 first; the other types are spread over nodes with equal links, and stay as they are."""
    assert order_by_bandwidth(read_bandwidths(CLUSTER_B), BY_TYPE_B) == (0, 1, 2, 3)
    cluster = make_cluster(("T4", 1, 2, 10e9), ("A10G", 1, 1, 0), ("A100-40", 1, 2, 200e9))
    assert order_by_bandwidth(read_bandwidths(cluster), ((0, 1), (2,), (3, 4))) == (1, 2, 0)


def test_interchangeable_groups_are_not_permuted() -> None:
    """Two nodes of two, two of eight: 4! / (2! 2!) orders."""
    bandwidths = read_bandwidths(CLUSTER_A)
    assert find_interchangeable(bandwidths, BY_NODE_A) == [[0, 1], [2, 3]]
    orders = order_groups(bandwidths, BY_NODE_A)
    assert len(orders) == 6 == len(set(orders))
    assert all(order.index(0) < order.index(1) and order.index(2) < order.index(3) for order in orders)
    assert len(order_groups(read_bandwidths(CLUSTER_B), BY_TYPE_B)) == 24


def test_groups_with_other_neighbours_are_not_interchangeable() -> None:
    """Two nodes, each in two halves: which halves follow each other makes a difference."""
    bandwidths = read_bandwidths(make_cluster(("T4", 2, 4, 10e9)))
    halves = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert find_interchangeable(bandwidths, halves) == [[0, 1], [2, 3]]


def test_a_group_on_one_node_is_another_than_one_across_nodes() -> None:
    """Even if bandwidths do not tell them apart, what they share does."""
    bandwidths = read_bandwidths(make_cluster(("T4", 2, 4, 1e9), between=1e9))
    groups = ((0, 1), (2, 4), (3, 5), (6, 7))
    assert find_interchangeable(bandwidths, groups) == [[0, 3], [1, 2]]


def test_a_node_with_other_memory_is_another() -> None:
    nodes = tuple(
        Node(name=f"n{i}", devices=("T4",), memory_bytes=(memory,)) for i, memory in enumerate((16, 16, 8))
    )
    bandwidths = read_bandwidths(Cluster(nodes=nodes, default_link=Link(1e9)))
    assert find_interchangeable(bandwidths, ((0,), (1,), (2,))) == [[0, 1], [2]]


def test_many_orders_are_left_to_the_rule() -> None:
    bandwidths = read_bandwidths(CLUSTER_B)
    assert len(order_groups(bandwidths, BY_TYPE_B, max_orders=23)) == 1
    by_node = tuple(tuple(range(8 * i, 8 * i + 8)) for i in range(8))
    assert order_groups(bandwidths, by_node) == (order_by_bandwidth(bandwidths, by_node),)
    singles = tuple((device,) for device in range(64))
    assert order_groups(bandwidths, singles) == (tuple(range(64)),)
    alike = read_bandwidths(make_cluster(("T4", 8, 2, 10e9)))
    assert len(order_groups(alike, tuple((2 * i, 2 * i + 1) for i in range(8)))) == 1


@settings(max_examples=60)
@given(cluster=small_clusters(max_nodes=3), data=st.data())
def test_every_order_is_there_up_to_interchangeable_groups(cluster: Cluster, data: st.DataObject) -> None:
    bandwidths = read_bandwidths(cluster)
    groupings = [grouping for grouping in find_groupings(bandwidths) if len(grouping.groups) <= 5]
    groups = data.draw(st.sampled_from(groupings)).groups
    orders = order_groups(bandwidths, groups)
    assert orders[0] == order_by_bandwidth(bandwidths, groups)
    class_of = {i: c for c, own in enumerate(find_interchangeable(bandwidths, groups)) for i in own}
    shapes = [tuple(class_of[i] for i in order) for order in orders]
    every = {tuple(class_of[i] for i in order) for order in permutations(range(len(groups)))}
    assert len(set(shapes)) == len(shapes) and set(shapes) == every


@settings(max_examples=60)
@given(cluster=small_clusters(max_nodes=3), data=st.data())
def test_interchangeable_groups_can_be_swapped(cluster: Cluster, data: st.DataObject) -> None:
    """Of what is looked at nothing changes: devices, their types, bandwidths to every third group."""
    bandwidths = read_bandwidths(cluster)
    groups = data.draw(st.sampled_from(find_groupings(bandwidths))).groups
    places = cluster.places

    def rates(first: tuple[int, ...], second: tuple[int, ...]) -> list[tuple[str, str, float]]:
        return sorted(
            (
                cluster.device_type(places[a]),
                cluster.device_type(places[b]),
                cluster.link(places[a], places[b]).bandwidth_bytes_per_s,
            )
            for a in first
            for b in second
            if a != b
        )

    for alike in find_interchangeable(bandwidths, groups):
        one = groups[alike[0]]
        for other in (groups[i] for i in alike[1:]):
            assert rates(one, one) == rates(other, other)
            assert all(
                rates(one, third) == rates(other, third) for third in groups if third not in (one, other)
            )
