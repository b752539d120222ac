"""Clusters: which link joins two devices, where a plan's ranks are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zorselike import Group, Microbatch, Ministage, Plan
from zorselike.errors import ClusterError
from zorselike.plan.cluster.cluster import Cluster, Link, Node, Place
from zorselike.plan.plan import Device

FABRIC, PAIR, ZONE, INSIDE, REGION, DEFAULT = (Link(rate) for rate in (6e9, 5e9, 4e9, 3e9, 2e9, 1e9))


def make_node(name: str, zone: str = "", region: str = "", *, devices: tuple[str, ...] = ("T4",)) -> Node:
    return Node(name=name, devices=devices, zone=zone, region=region, fabric=FABRIC)


CLUSTER = Cluster(
    nodes=(
        make_node("b", "z1", "r1", devices=("T4", "L4")),
        make_node("a", "z1", "r1"),
        make_node("c", "z1", "r1"),
        make_node("d", "z2", "r1"),
        make_node("e", "z3", "r2"),
        make_node("f.lab.example"),
    ),
    node_links={("a", "b"): PAIR},
    zone_links={("z1", "z2"): ZONE, ("z1", "z1"): INSIDE},
    region_links={("r1", "r2"): REGION},
    default_link=DEFAULT,
)


@pytest.mark.parametrize(
    ("first", "second", "link"),
    [
        (Place(0, 0), Place(0, 1), FABRIC),
        (Place(0, 0), Place(1, 0), PAIR),
        (Place(0, 1), Place(2, 0), INSIDE),
        (Place(1, 0), Place(3, 0), ZONE),
        (Place(3, 0), Place(4, 0), REGION),
        (Place(4, 0), Place(5, 0), DEFAULT),
    ],
)
def test_the_most_special_link_joins_two_devices(first: Place, second: Place, link: Link) -> None:
    assert CLUSTER.link(first, second) == CLUSTER.link(second, first) == link


def test_what_is_not_connected_is_named() -> None:
    alone = replace(CLUSTER, default_link=None)
    with pytest.raises(
        ClusterError, match=r"how nodes d and f.lab.example are connected; add a \[\[links\]\]"
    ):
        alone.link(Place(3, 0), Place(5, 0))
    bare = replace(CLUSTER, nodes=(replace(CLUSTER.nodes[0], fabric=None),))
    with pytest.raises(ClusterError, match="how the devices of node b are connected; give the node a fabric"):
        bare.link(Place(0, 0), Place(0, 1))


def test_places_are_counted_node_by_node() -> None:
    assert CLUSTER.num_devices == 7
    assert CLUSTER.places[:3] == (Place(0, 0), Place(0, 1), Place(1, 0))
    assert CLUSTER.device_type(Place(0, 1)) == "L4"


# -- a plan's ranks --------------------------------------------------------------------------


def make_plan(num_ranks: int, *devices: Device) -> Plan:
    return Plan(
        global_batch=num_ranks,
        groups=(Group(tuple(range(num_ranks)), tuple(Microbatch(r, r, r + 1) for r in range(num_ranks))),),
        ministages=(Ministage(0, ("layers.0",)),),
        devices=devices,
    )


def test_ranks_without_devices_take_places_in_order() -> None:
    assert CLUSTER.place_ranks(make_plan(3)) == CLUSTER.places[:3]


def test_ranks_are_placed_by_the_plans_devices() -> None:
    plan = make_plan(3, Device(2, "b", 1, "l4"), Device(0, "e", 0), Device(1, "f", 0, "T4"))
    assert CLUSTER.place_ranks(plan) == (Place(4, 0), Place(5, 0), Place(0, 1))


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (make_plan(8), "the plan is for 8 ranks, the cluster has 7 devices; plan for fewer, or add nodes"),
        (
            make_plan(1, Device(0, "g", 0)),
            "rank 0 is on node g, which the cluster does not have; its nodes are",
        ),
        (make_plan(1, Device(0, "f.lab.exampel", 0)), "did you mean 'f.lab.example'"),
        (make_plan(1, Device(0, "b", 2)), "local rank 2 of node b, which has 2 devices in the cluster"),
        (
            make_plan(1, Device(0, "b", 0, "A100-40")),
            "is 'A100-40' in the plan; local rank 0 of node b is 'T4'",
        ),
        (make_plan(2, Device(0, "a", 0), Device(1, "a", 0)), "ranks 0 and 1 are both local rank 0 of node a"),
    ],
)
def test_a_plan_for_other_devices_is_refused(plan: Plan, told: str) -> None:
    with pytest.raises(ClusterError, match=told):
        CLUSTER.place_ranks(plan)


def test_a_short_name_of_several_nodes_is_refused() -> None:
    cluster = Cluster(nodes=(make_node("f.lab"), make_node("f.hall")), default_link=DEFAULT)
    with pytest.raises(
        ClusterError, match=r"may be any of f.lab, f.hall of the cluster; write the full name"
    ):
        cluster.place_ranks(make_plan(1, Device(0, "f", 0)))
