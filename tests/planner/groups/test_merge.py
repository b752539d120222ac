"""Merging by bandwidth: nested partitions, the fastest links first."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from clusters import CLUSTER_B, make_cluster, small_clusters
from hypothesis import given, settings

from zorselike.plan.cluster.cluster import Cluster
from zorselike.planner.groups import merge as merging
from zorselike.planner.groups.bandwidths import read_bandwidths
from zorselike.planner.groups.merge import merge_by_bandwidth


def across(cluster: Cluster, first: tuple[int, ...], second: tuple[int, ...]) -> float:
    """The slowest link between devices of two groups."""
    places = cluster.places
    return min(cluster.link(places[a], places[b]).bandwidth_bytes_per_s for a in first for b in second)


def region_of(cluster: Cluster, device: int) -> str:
    return cluster.nodes[cluster.places[device].node].region


@settings(max_examples=60)
@given(cluster=small_clusters())
def test_one_nested_partition_for_every_number_of_groups(cluster: Cluster) -> None:
    bandwidths = read_bandwidths(cluster)
    partitions = list(merge_by_bandwidth(bandwidths, cluster.num_devices))
    num_regions = len({node.region for node in cluster.nodes})
    assert [len(partition) for partition in partitions] == list(
        range(cluster.num_devices, num_regions - 1, -1)
    )
    for fine, coarse in pairwise(partitions):
        assert all(any(set(group) <= set(whole) for whole in coarse) for group in fine)
        new = next(group for group in coarse if group not in fine)
        merged = [group for group in fine if set(group) <= set(new)]
        fastest = max(
            across(cluster, a, b)
            for a, b in combinations(fine, 2)
            if region_of(cluster, a[0]) == region_of(cluster, b[0])
        )
        assert len(merged) == 2 and across(cluster, *merged) == fastest


def test_like_types_merge_before_others() -> None:
    """Between nodes all links of cluster B are equal, and the paper's four groups come of it."""
    partitions = {len(groups): groups for groups in merge_by_bandwidth(read_bandwidths(CLUSTER_B), 8)}
    assert [len(group) for group in partitions[8]] == [8] * 8
    assert [len(group) for group in partitions[4]] == [8, 16, 16, 24]
    assert len(partitions) == 8


def test_what_is_alike_merges_evenly() -> None:
    cluster = make_cluster(("T4", 8, 4, 10e9))
    partitions = {len(groups): groups for groups in merge_by_bandwidth(read_bandwidths(cluster), 8)}
    assert [[len(group) for group in partitions[k]] for k in (2, 4, 8)] == [[16] * 2, [8] * 4, [4] * 8]


def test_many_devices_start_as_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And come to the same from there on, where the fabric is faster than what joins the nodes."""
    bandwidths = read_bandwidths(CLUSTER_B)
    from_devices = [groups for groups in merge_by_bandwidth(bandwidths, 64) if len(groups) <= 8]
    monkeypatch.setattr(merging, "MAX_DEVICES_ALONE", 10)
    assert list(merge_by_bandwidth(bandwidths, 64)) == from_devices


def test_the_rates_of_a_cluster_stay_as_they_are() -> None:
    bandwidths = read_bandwidths(CLUSTER_B)
    before = bandwidths.rates.copy()
    list(merge_by_bandwidth(bandwidths, 8))
    assert np.array_equal(bandwidths.rates, before)
