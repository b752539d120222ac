"""The network: which capacities there are, and what transfers, rings and copies put on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zorselike.cost import wires
from zorselike.cost.network import Flow, Network
from zorselike.cost.profile import CollectiveTimes, HostLinkRates, LinkTimes, Profile, Source
from zorselike.cost.wires import REACHED_OF_BUS, fit_link, make_network
from zorselike.errors import ClusterError, ProfileError
from zorselike.plan.cluster.cluster import Cluster, Link, Node, Place

SOURCE = Source("measured", "2026-11-21")
FABRIC = Link(100.0, 0.01)
NIC = Link(10.0)


def make_cluster(*sizes: int, types: Sequence[str] = ("T4",), **changes: Any) -> Cluster:
    """Nodes a, b, c ... of so many devices; `changes` of the cluster, or with `each_` of every node."""
    of_nodes: dict[str, Any] = {"fabric": FABRIC, "nic": NIC}
    of_nodes |= {key[5:]: changes.pop(key) for key in list(changes) if key.startswith("each_")}
    nodes = tuple(
        Node(
            name="abcdefgh"[i],
            devices=tuple(types[j % len(types)] for j in range(size)),
            zone=f"z{i}",
            region="eu" if i < 2 else "us",
            **of_nodes,
        )
        for i, size in enumerate(sizes)
    )
    return Cluster(**({"nodes": nodes, "default_link": Link(20.0, 0.5)} | changes))


def network_of(cluster: Cluster, **entries: Any) -> Network:
    return make_network(cluster, cluster.places, Profile(model="m", **entries))


def named(network: Network, flow: Flow) -> list[str]:
    return sorted(network.names[index] for index in flow.capacities)


def alone_s(network: Network, flows: Sequence[Flow]) -> float:
    """Seconds of flows that share no capacity with each other."""
    assert len({i for flow in flows for i in flow.capacities}) == sum(len(f.capacities) for f in flows)
    return max(
        flow.latency_s
        + flow.num_bytes / min([flow.max_rate, *(network.capacities[i] for i in flow.capacities)])
        for flow in flows
    )


# -- transfers -----------------------------------------------------------------------------


def test_inside_a_node_each_device_has_its_way_in_and_out() -> None:
    network = network_of(make_cluster(2, 2))
    flow = network.transfer(0, 1, 500.0)
    assert flow == replace(flow, num_bytes=500.0, max_rate=100.0, latency_s=0.01, egress=None)
    assert named(network, flow) == ["node a, device 0, out", "node a, device 1, in"]
    back = network.transfer(1, 0, 500.0)
    assert not set(flow.capacities) & set(back.capacities)
    assert [network.capacities[i] for i in flow.capacities] == [100.0, 100.0]


def test_a_shared_bus_is_one_capacity() -> None:
    network = network_of(make_cluster(4, each_fabric_total_bytes_per_s=150.0))
    flows = [network.transfer(0, 1, 1.0), network.transfer(1, 0, 1.0), network.transfer(2, 3, 1.0)]
    assert {flow.capacities for flow in flows} == {flows[0].capacities}
    assert [network.capacities[i] for i in flows[0].capacities] == [150.0]
    assert flows[0].max_rate == 100.0


def test_between_nodes_the_cards_are_shared() -> None:
    network = network_of(make_cluster(2, 2))
    flow = network.transfer(0, 2, 100.0)
    assert named(network, flow) == ["node a, out", "node b, in"]
    assert (flow.max_rate, flow.latency_s, flow.egress) == (20.0, 0.5, (0, 1))
    assert [network.capacities[i] for i in flow.capacities] == [10.0, 10.0]
    assert network.transfer(1, 3, 1.0).capacities == flow.capacities
    assert not set(network.transfer(2, 0, 1.0).capacities) & set(flow.capacities)


def test_a_link_narrower_than_the_cards_is_a_capacity_of_its_own() -> None:
    cluster = make_cluster(1, 1, 1, node_links={("a", "b"): Link(3.0)})
    network = network_of(cluster)
    assert named(network, network.transfer(0, 1, 1.0)) == ["node a, out", "node b, in", "nodes a - b"]
    assert named(network, network.transfer(0, 2, 1.0)) == ["node a, out", "node c, in"]
    without_cards = network_of(make_cluster(1, 1, each_nic=None))
    flow = without_cards.transfer(0, 1, 1.0)
    assert named(without_cards, flow) == ["nodes a - b"]
    assert without_cards.capacities[flow.capacities[0]] == 20.0


def test_regions_share_a_link_each_way() -> None:
    cluster = make_cluster(1, 1, 1, 1, shared_links={("eu", "us"): 4.0})
    network = network_of(cluster)
    there, also, back = (network.transfer(a, b, 1.0) for a, b in ((0, 2), (1, 3), (2, 0)))
    shared = set(there.capacities) & set(also.capacities)
    assert [network.names[i] for i in shared] == ["regions eu - us"]
    assert [network.capacities[i] for i in shared] == [4.0]
    assert not shared & set(back.capacities)
    assert "regions us - eu" in named(network, back)
    assert "regions eu - us" not in named(network, network.transfer(0, 1, 1.0))


def test_zones_may_share_one_too() -> None:
    network = network_of(make_cluster(1, 1, 1, shared_links={("z0", "z1"): 4.0}))
    assert "zones z0 - z1" in named(network, network.transfer(0, 1, 1.0))
    assert "zones z0 - z1" not in named(network, network.transfer(0, 2, 1.0))


def test_a_links_curve_gives_the_rate_of_a_size() -> None:
    link = Link(20.0, 0.5, ((10.0, 2.0), (1000.0, 20.0)))
    network = network_of(make_cluster(1, 1, default_link=link))
    assert network.transfer(0, 1, 5.0).max_rate == 2.0
    assert network.transfer(0, 1, 100.0).max_rate == pytest.approx(11.0)
    assert network.transfer(0, 1, 1e6).max_rate == 20.0
    assert network.transfer(0, 1, 0.0).max_rate > 0


def test_ranks_may_be_anywhere() -> None:
    cluster = make_cluster(2, 2)
    network = make_network(cluster, (Place(1, 1), Place(0, 0), Place(1, 0)))
    assert network.transfer(0, 1, 1.0).egress == (1, 0)
    assert named(network, network.transfer(0, 2, 1.0)) == ["node b, device 0, in", "node b, device 1, out"]
    assert not [name for name in network.names if "node a, device 0, out" in name]  # It is alone there.


@given(
    sizes=st.lists(st.integers(1, 3), min_size=2, max_size=5),
    ways=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([1.0, 500.0])), max_size=12
    ),
    total=st.sampled_from([None, 12.0]),
    measured=st.booleans(),
)
def test_wires_that_are_made_when_asked_for_are_the_same(
    sizes: list[int], ways: list[tuple[int, int, float]], total: float | None, measured: bool
) -> None:
    shared = {} if total is None else {"shared_links": {("eu", "us"): total}}
    cluster = make_cluster(*sizes, default_link=Link(8.0, 0.5), **shared)
    links = (
        (LinkTimes(between=("a", "b"), num_bytes=(1, 100), seconds=(0.1, 5.0), source=SOURCE),)
        if measured
        else ()
    )
    profile = Profile(model="m", links=links)
    ready = make_network(cluster, cluster.places, profile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wires, "MANY_NODES", 1)
        asked = make_network(cluster, cluster.places, profile)
    num_devices = len(cluster.places)
    for a, b, num_bytes in ways:
        source, target = a % num_devices, b % num_devices
        if source != target:
            flows = [network.transfer(source, target, num_bytes) for network in (ready, asked)]
            assert replace(flows[0], capacities=()) == replace(flows[1], capacities=())
            assert named(ready, flows[0]) == named(asked, flows[1])
            rates = [
                sorted(own.capacities[i] for i in flow.capacities)
                for own, flow in zip((ready, asked), flows, strict=True)
            ]
            assert rates[0] == rates[1]
    assert len(asked.capacities) == len(asked.names) <= len(ready.capacities)
    assert dict(asked.wires).keys() == dict(ready.wires).keys()


def test_what_nothing_connects_is_an_error_only_when_it_is_used() -> None:
    cluster = make_cluster(2, 1, 1, default_link=None, node_links={("a", "b"): Link(1.0)}, each_fabric=None)
    network = network_of(cluster)
    network.transfer(0, 2, 1.0)
    with pytest.raises(ClusterError, match="nothing says how nodes a and c are connected"):
        network.transfer(0, 3, 1.0)
    with pytest.raises(ClusterError, match="devices of node a are connected"):
        network.transfer(0, 1, 1.0)
    with pytest.raises(ClusterError, match="nodes b and c"):
        network.collective("all_gather", [2, 3], 8.0)


# -- rings ---------------------------------------------------------------------------------


def test_a_ring_inside_a_node_is_one_flow() -> None:
    network = network_of(make_cluster(4))
    (flow,) = network.collective("all_gather", [0, 1, 2, 3], 800.0)
    assert flow.num_bytes == 600.0
    assert len(flow.capacities) == 8  # In and out of four devices.
    assert flow.latency_s == pytest.approx(3 * 0.01)
    assert flow.egress is None
    assert alone_s(network, [flow]) == pytest.approx(0.03 + 6.0)


def test_a_ring_over_nodes_crosses_each_boundary_once() -> None:
    network = network_of(make_cluster(2, 2, 1))
    flows = network.collective("reduce_scatter", [4, 2, 0, 1, 3], 1000.0)
    assert sorted(flow.egress for flow in flows if flow.egress) == [(0, 1), (1, 2), (2, 0)]
    assert len(flows) == 3 + 2  # Node c has one device: nothing inside it.
    assert {flow.num_bytes for flow in flows} == {800.0}
    assert all(flow.latency_s == pytest.approx(3 * 0.5 + 0.01) for flow in flows)
    assert alone_s(network, flows) == pytest.approx(3 * 0.5 + 0.01 + 800.0 / 10.0)


def pass_around(links: Sequence[Link], chunk_bytes: float, num_rounds: int) -> float:
    """Seconds of a ring, chunk by chunk: each rank sends on what it received in the step before."""
    free_s = [0.0] * len(links)
    received_s = [0.0] * len(links)
    for _ in range(num_rounds * (len(links) - 1)):
        for rank, link in enumerate(links):
            free_s[rank] = max(free_s[rank], received_s[rank]) + chunk_bytes / link.bandwidth_bytes_per_s
        received_s = [free_s[rank - 1] + links[rank - 1].latency_s for rank in range(len(links))]
    return max(received_s)


@pytest.mark.parametrize("sizes", [(2,), (1, 1), (2, 2), (4, 4), (8, 8), (3, 1, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("latency_s", [0.01, 0.5, 20.0, 1000.0])
@pytest.mark.parametrize("op", ["all_gather", "all_reduce"])
def test_a_ring_takes_little_more_than_its_chunks_one_by_one(
    sizes: Sequence[int], latency_s: float, op: Any
) -> None:
    cluster = make_cluster(*sizes, default_link=Link(10.0, latency_s))
    network = network_of(cluster)
    places = cluster.places
    links = [cluster.link(a, b) for a, b in pairwise([*places, places[0]])]
    expected = pass_around(links, 1000.0 / len(places), 2 if op == "all_reduce" else 1)
    flows = network.collective(op, range(len(places)), 1000.0)
    # Latencies are passed while other chunks move; the model adds them to the time of the bytes.
    assert expected * 0.95 <= alone_s(network, flows) <= expected * 1.4


@pytest.mark.parametrize(
    ("op", "share", "steps"),
    [("all_gather", 3 / 4, 3), ("reduce_scatter", 3 / 4, 3), ("all_reduce", 3 / 2, 6)],
)
def test_bytes_and_latencies_of_each_collective(op: Any, share: float, steps: int) -> None:
    network = network_of(make_cluster(1, 1, 1, 1))
    flows = network.collective(op, [0, 1, 2, 3], 1000.0)
    assert len(flows) == 4
    assert {flow.num_bytes for flow in flows} == {1000.0 * share}
    assert {flow.latency_s for flow in flows} == {0.5 * steps}


def test_a_rank_alone_moves_nothing() -> None:
    network = network_of(make_cluster(2))
    assert network.collective("all_gather", [1], 1e9) == ()


def test_on_a_shared_bus_all_edges_add_up() -> None:
    network = network_of(make_cluster(4, 1, each_fabric_total_bytes_per_s=150.0))
    (flow,) = network.collective("all_gather", [0, 1, 2, 3], 800.0)
    assert flow.num_bytes == 4 * 600.0
    assert flow.max_rate == 4 * 100.0
    assert alone_s(network, [flow]) == pytest.approx(0.03 + 4 * 600.0 / 150.0)
    inside = [f for f in network.collective("all_gather", [0, 1, 2, 3, 4], 1000.0) if not f.egress]
    assert [f.num_bytes for f in inside] == [3 * 800.0]  # The last of node a sends to node b.


def test_chunks_set_the_rate_of_a_ring() -> None:
    link = Link(20.0, 0.0, ((10.0, 2.0), (1000.0, 20.0)))
    network = network_of(make_cluster(1, 1, default_link=link, each_nic=Link(100.0)))
    flows = network.collective("all_gather", [0, 1], 200.0)
    assert [flow.max_rate for flow in flows] == [pytest.approx(11.0)] * 2


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([None, 500.0]),
)
def test_every_ring_passes_each_node_once_each_way(sizes: list[int], rng: Any, total: float | None) -> None:
    cluster = make_cluster(*sizes, each_fabric_total_bytes_per_s=total)
    network = network_of(cluster)
    ranks = [rank for rank in range(cluster.num_devices) if rng.random() < 0.8]
    rng.shuffle(ranks)
    flows = network.collective("all_gather", ranks, 1e6)
    nodes = {cluster.places[rank].node for rank in ranks}
    if len(ranks) < 2:
        assert flows == ()
        return
    crossings = [flow.egress for flow in flows if flow.egress is not None]
    if len(nodes) > 1:
        assert sorted(a for a, _ in crossings) == sorted(nodes) == sorted(b for _, b in crossings)
    else:
        assert crossings == []
    edge_bytes = 1e6 * (len(ranks) - 1) / len(ranks)
    total_bytes = sum(
        flow.num_bytes * (1 if flow.egress or total else len(flow.capacities) // 2) for flow in flows
    )
    assert total_bytes == pytest.approx(edge_bytes * len(ranks))


# -- copies --------------------------------------------------------------------------------


def test_copies_use_the_measured_rates_first() -> None:
    rates = HostLinkRates(device="T4", to_device=12.0, to_host=10.0, both=16.0, source=SOURCE)
    cluster = make_cluster(1, each_host_link=Link(5.0))
    network = network_of(cluster, host_links=(rates,))
    load, store = (network.copy(0, 100.0, to_device=way) for way in (True, False))
    assert (load.max_rate, store.max_rate) == (12.0, 10.0)
    (both,) = set(load.capacities) & set(store.capacities)
    assert network.capacities[both] == 16.0
    assert named(network, load) == ["node a, device 0, from host", "node a, device 0, host both ways"]


def test_copies_by_the_cluster_and_then_the_catalogue() -> None:
    given_link = network_of(make_cluster(1, each_host_link=Link(5.0, 0.25)))
    flow = given_link.copy(0, 100.0, to_device=False)
    assert (flow.max_rate, flow.latency_s) == (5.0, 0.25)
    assert not set(flow.capacities) & set(given_link.copy(0, 1.0, to_device=True).capacities)
    shared = network_of(make_cluster(1, each_host_link=Link(5.0), each_host_link_both_bytes_per_s=6.0))
    assert "node a, device 0, host both ways" in shared.names
    by_bus = network_of(make_cluster(1)).copy(0, 100.0, to_device=True)
    assert by_bus.max_rate == REACHED_OF_BUS * 15.75e9
    unknown = network_of(make_cluster(1, types=("T5",)))
    with pytest.raises(ClusterError, match=r"how fast T5 of node a copies .* give the node a host_link"):
        unknown.copy(0, 1.0, to_device=True)


# -- measurements --------------------------------------------------------------------------


def link_times(between: tuple[str, str], seconds: Mapping[int, float]) -> LinkTimes:
    return LinkTimes(
        between=between, num_bytes=tuple(seconds), seconds=tuple(seconds.values()), source=SOURCE
    )


def test_a_measured_link_goes_before_the_given_one() -> None:
    times = link_times(("a", "b"), {100: 1.0, 200: 1.5, 1000: 5.5})
    assert fit_link(times) == Link(200.0, 0.5, ((100.0, 200.0), (200.0, 200.0), (1000.0, 200.0)))
    network = network_of(make_cluster(1, 1), links=(times,))
    flow = network.transfer(0, 1, 1000.0)
    assert (flow.max_rate, flow.latency_s) == (200.0, 0.5)
    # What was reached, the cards carry.
    assert alone_s(network, [flow]) == pytest.approx(5.5)


def test_a_measured_fabric_goes_before_the_given_one() -> None:
    network = network_of(make_cluster(2), links=(link_times(("a", "a"), {10: 0.1, 1000: 10.0}),))
    flow = network.transfer(0, 1, 1000.0)
    assert flow.latency_s == pytest.approx(0.0)
    assert alone_s(network, [flow]) == pytest.approx(10.0, rel=0.02)


@pytest.mark.parametrize("noise_s", [-2e-7, 0.0, 3.1e-6, 3.2e-6])
def test_small_messages_do_not_say_what_a_link_carries(noise_s: float) -> None:
    # 30 us and 1.25 GB/s; what 4 KB take is a little off, or as much as 1 KB.
    seconds = {size: 3e-5 + size / 1.25e9 for size in (1000, 5000, 10**6, 10**8)}
    seconds[5000] = seconds[5000] - noise_s
    link = fit_link(link_times(("a", "b"), seconds))
    assert link.bandwidth_bytes_per_s == pytest.approx(1.25e9, rel=0.05)
    for size, measured_s in seconds.items():
        assert link.latency_s + size / link.rate(size) == pytest.approx(measured_s, rel=0.15)


def test_odd_link_times_still_give_a_link() -> None:
    flat = fit_link(link_times(("a", "b"), {10: 1.0, 1000: 1.0}))
    assert flat.latency_s == 0.0 and flat.bandwidth_bytes_per_s == 1000.0
    one = fit_link(link_times(("a", "b"), {10: 1.0}))
    assert (one.latency_s, one.bandwidth_bytes_per_s) == (0.0, 10.0)
    with pytest.raises(ProfileError, match="link a - b: no size and time above zero"):
        fit_link(link_times(("a", "b"), {10: 0.0}))


def test_a_measured_collective_takes_the_measured_seconds() -> None:
    times = CollectiveTimes(
        op="all_gather",
        devices=("A100-40", "A100-40", "T4", "T4"),
        num_nodes=2,
        num_bytes=(100, 1000),
        seconds=(10.0, 100.0),
        source=SOURCE,
    )
    cluster = make_cluster(2, 2, types=("T4", "A100-40"))
    network = network_of(cluster, collectives=(times,))
    flows = network.collective("all_gather", [0, 1, 2, 3], 500.0)
    assert len(flows) == 4
    assert alone_s(network, flows) == pytest.approx(50.0)
    # Neither another collective nor another group.
    assert max(f.max_rate for f in network.collective("reduce_scatter", [0, 1, 2, 3], 500.0)) == 100.0
    assert [f.max_rate for f in network.collective("all_gather", [0, 2], 500.0)] == [20.0, 20.0]
    # Latency is apart, so that others have the wires meanwhile.
    slow_start = replace(times, seconds=(60.0, 150.0))
    with_latency = network_of(cluster, collectives=(slow_start,)).collective("all_gather", range(4), 500.0)
    assert [flow.latency_s for flow in with_latency] == [pytest.approx(50.0)] * 4
    instant = network_of(cluster, collectives=(replace(times, seconds=(0.0, 0.0)),))
    assert {flow.max_rate for flow in instant.collective("all_gather", range(4), 500.0)} == {math.inf}
