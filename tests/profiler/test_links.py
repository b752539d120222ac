"""Which links are measured, at what time, and the cluster that is made of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from profiled import join
from ranks import RunRanks, free_port

from zorselike.cost.profile import HostLinkRates, LinkTimes, Source
from zorselike.plan.cluster.cluster import Cluster, Node, Place
from zorselike.profiler.machine.collective_timing import (
    Collectives,
    measure_collectives,
)
from zorselike.profiler.machine.found_cluster import make_cluster
from zorselike.profiler.machine.host_link_timing import measure_host_link
from zorselike.profiler.machine.link_timing import choose_pairs, make_rounds, measure_links

SOURCE = Source("measured", "2026-11-21", "a test")
GIB = 2**30

NODES = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3),
    st.lists(st.sampled_from(["T4", "A100-40"]), min_size=1, max_size=3),
    min_size=1,
    max_size=9,
)


# -- what is measured ------------------------------------------------------------------------


@given(devices=NODES)
def test_every_pair_is_stood_for_by_one_that_is_like_it(devices: dict[str, list[str]]) -> None:
    chosen = choose_pairs(devices)
    stood_for = [pair for alike in chosen.values() for pair in alike]
    names = sorted(devices)
    wanted = [(a, b) for i, a in enumerate(names) for b in names[i:] if a != b or len(devices[a]) > 1]
    assert sorted(stood_for) == sorted(wanted)

    def types(pair: tuple[str, str]) -> Any:
        return pair[0] == pair[1], sorted(sorted(devices[node]) for node in pair)

    for pair, alike in chosen.items():
        assert pair in alike and all(types(other) == types(pair) for other in alike)
    # Only distinct pairs of types are measured.
    assert len({str(types(pair)) for pair in chosen}) == len(chosen)


@given(devices=NODES)
def test_no_node_is_in_two_measurements_at_once(devices: dict[str, list[str]]) -> None:
    pairs = list(choose_pairs(devices))
    rounds = make_rounds(pairs)
    assert sorted(pair for pairs_of_round in rounds for pair in pairs_of_round) == sorted(pairs)
    for pairs_of_round in rounds:
        nodes = [node for pair in pairs_of_round for node in set(pair)]
        assert len(nodes) == len(set(nodes))


def test_the_insides_of_different_nodes_are_measured_at_once() -> None:
    pairs = choose_pairs({"a": ["T4", "T4"], "b": ["L4", "L4"], "c": ["T4", "T4"]})
    inside = [pair for pair in pairs if pair[0] == pair[1]]
    assert len(pairs) == 4 and len(inside) == 2
    assert any(set(inside) <= set(together) for together in make_rounds(pairs))


# -- measuring -------------------------------------------------------------------------------


def time_links(rank: int, size: int, port: int) -> list[LinkTimes]:
    with join(port, "b" if rank == 2 else "a") as processes:
        assert processes.nodes == {"a": [0, 1], "b": [2]}
        pairs = [("a", "b"), ("a", "a")]
        return measure_links(pairs, processes, repeats=2, source=SOURCE, sizes=(2**10, 2**20))


def test_links_are_measured_by_the_rank_that_begins(run_ranks: RunRanks) -> None:
    found = run_ranks(time_links, 3, free_port(), init=False)
    assert [[times.between for times in own] for own in found] == [[("a", "a"), ("a", "b")], [], []]
    for times in found[0]:
        assert times.num_bytes == (2**10, 2**20) and all(seconds > 0 for seconds in times.seconds)


def time_collectives(rank: int, size: int) -> Any:
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    times = measure_collectives(
        group, device, devices=["T4", "L4"], num_nodes=2, repeats=1, source=SOURCE, sizes=(2**12, 2**14)
    )
    return times, Collectives(group, device).time("all_gather", 7, torch.bfloat16)


def test_collectives_are_measured_by_op_and_size(run_ranks: RunRanks) -> None:
    for times, uneven_s in run_ranks(time_collectives, 2):
        assert [entry.op for entry in times] == ["all_gather", "reduce_scatter", "all_reduce"]
        assert all(entry.devices == ("L4", "T4") and entry.num_nodes == 2 for entry in times)
        assert all(seconds > 0 for entry in times for seconds in entry.seconds)
        assert uneven_s > 0


def copy_rates(rank: int, size: int) -> HostLinkRates:
    return measure_host_link(torch.device("cpu"), type="CPU", repeats=1, source=SOURCE)


def test_a_host_link_has_both_ways(run_ranks: RunRanks) -> None:
    rates = run_ranks(copy_rates, 1, init=False)[0]
    assert min(rates.to_device, rates.to_host, rates.both) > 1e6


# -- the cluster -----------------------------------------------------------------------------


def link(a: str, b: str, rate: float) -> LinkTimes:
    sizes = (2**10, 2**20, 2**24)
    return LinkTimes(
        between=(a, b),
        num_bytes=sizes,
        seconds=tuple(1e-5 + size / rate for size in sizes),
        source=SOURCE,
    )


def test_the_cluster_says_of_alike_nodes_what_was_measured_of_one(tmp_path: Any) -> None:
    devices = {"a": ["T4", "T4"], "b": ["T4", "T4"], "c": ["L4"], "d": ["L4"]}
    chosen = choose_pairs(devices)
    rate = {True: 8e9, False: 1e9}
    nodes = [
        Node(
            name=name,
            devices=tuple(types),
            memory_bytes=(16 * GIB,) * len(types),
            host_memory_bytes=64 * GIB,
        )
        for name, types in devices.items()
    ]
    rates = [
        HostLinkRates(device="T4", to_device=9e9, to_host=8e9, both=12e9, source=SOURCE),
        HostLinkRates(device="L4", to_device=20e9, to_host=21e9, both=40e9, source=SOURCE),
    ]
    links = [link(*pair, rate[pair[0] == pair[1]]) for pair in chosen]
    cluster = make_cluster(nodes, host_links=rates, links=links, stands_for=chosen)
    for i, first in enumerate(cluster.places):
        for second in cluster.places[i + 1 :]:
            expected = rate[first.node == second.node]
            assert cluster.link(first, second).bandwidth_bytes_per_s == pytest.approx(expected, rel=0.01)
    assert cluster.device_type(Place(2, 0)) == "L4"
    assert cluster.nodes[0].host_link is not None
    assert cluster.nodes[0].host_link.bandwidth_bytes_per_s == 8e9
    assert cluster.nodes[2].host_link_both_bytes_per_s == 40e9
    cluster.save(tmp_path / "cluster.toml")
    assert Cluster.load(tmp_path / "cluster.toml").fingerprint == cluster.fingerprint


def test_a_found_cluster_is_short_enough_to_read(tmp_path: Any) -> None:
    rates = [HostLinkRates(device="T4", to_device=9e10 / 7, to_host=8e10 / 7, both=1e11 / 7, source=SOURCE)]
    sizes = (2**10, 2**20, 2**24)
    times = LinkTimes(
        between=("a", "a"),
        num_bytes=sizes,
        seconds=tuple(1e-5 / 3 + size / 7e9 for size in sizes),
        source=SOURCE,
    )
    node = Node(name="a", devices=("T4", "T4"), memory_bytes=(16 * GIB,) * 2, host_memory_bytes=64 * GIB)
    cluster = make_cluster([node], host_links=rates, links=[times], stands_for={})
    cluster.save(tmp_path / "cluster.toml")
    text = (tmp_path / "cluster.toml").read_text()
    assert 'host_link = { bandwidth = "11.43GB/s" }' in text and 'host_link_both = "14.29GB/s"' in text
    assert 'bandwidth = "7GB/s", latency = "3.333us"' in text
    assert max(map(len, re.findall(r"[\d.]+", text))) <= 7
