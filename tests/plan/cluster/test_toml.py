"""Cluster files: what people may write, what is refused, and that what is written is read back."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zorselike.errors import ClusterError
from zorselike.plan.cluster.cluster import Cluster, Link, Node, Place
from zorselike.plan.cluster.device_types import DEVICE_TYPES
from zorselike.plan.cluster.toml import format_cluster

RECIPES = Path(__file__).parents[3] / "recipes" / "clusters"

TEXT = """
version = 1
default_link = { bandwidth = "10Gb/s", latency = "50us" }

[[nodes]]
name = "big-{}"
copies = 2
device = "A100-40"
count = 4
zone = "a"
region = "east"
price_per_hour = 14.5
host_memory = "256GiB"
device_memory = "39GiB"
host_link = { bandwidth = "24GB/s" }
host_link_both = "40GB/s"
fabric = { bandwidth = "200GB/s", latency = "10us" }
fabric_total = "600GB/s"
nic = { bandwidth = "50Gb/s" }

[[nodes]]
name = "small"
devices = ["T4", "L4"]
zone = "b"
region = "east"
fabric = { bandwidth = "10GB/s" }

[[links]]
nodes = ["small", "big-1"]
points = [["1MB", "1GB/s"], ["64MB", "2GB/s"]]

[[links]]
zones = ["b", "a"]
bandwidth = "5Gb/s"
latency = "1ms"
total = "20Gb/s"

[[egress]]
from = "a"
to = "b"
price_per_gb = 0.01
"""


def test_a_file_says_what_people_mean() -> None:
    fabric = Link(200e9, 1e-5)
    big = Node(
        name="big-0",
        devices=("A100-40",) * 4,
        memory_bytes=(39 * 2**30,) * 4,
        zone="a",
        region="east",
        price_per_hour=14.5,
        host_memory_bytes=256 * 2**30,
        host_link=Link(24e9),
        host_link_both_bytes_per_s=40e9,
        fabric=fabric,
        fabric_total_bytes_per_s=600e9,
        nic=Link(6.25e9),
    )
    small = Node(name="small", devices=("T4", "L4"), zone="b", region="east", fabric=Link(10e9))
    assert Cluster.parse(TEXT) == Cluster(
        nodes=(big, replace(big, name="big-1"), small),
        node_links={("big-1", "small"): Link(2e9, 0.0, ((1e6, 1e9), (64e6, 2e9)))},
        zone_links={("a", "b"): Link(625e6, 1e-3)},
        default_link=Link(1.25e9, 5e-5),
        shared_links={("a", "b"): 2.5e9},
        egress_price_per_gb={("a", "b"): 0.01},
    )


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_are_valid(path: Path, tmp_path: Path) -> None:
    cluster = Cluster.load(path)
    cluster.save(tmp_path / "saved.toml")
    assert Cluster.load(tmp_path / "saved.toml") == cluster


def test_a_fit_is_read_as_points() -> None:
    fit = '{ coefficients = [0.1, 0.2, 1], max = "2GB/s", from = "1MB", to = "8MB" }'
    cluster = Cluster.parse(TEXT.replace('bandwidth = "10GB/s"', f"fit = {fit}"))
    expected = Link(2e9, 0.0, ((1e6, 1e9), (2e6, 1.3e9), (4e6, 1.8e9), (8e6, 2e9)))
    assert cluster.nodes[2].fabric == expected


def test_copies_are_numbered_from_where_one_says() -> None:
    cluster = Cluster.parse(TEXT.replace("copies = 2", "copies = 2\nfirst = 0")).nodes
    assert [node.name for node in cluster] == ["big-0", "big-1", "small"]
    shifted = Cluster.parse(TEXT.replace("copies = 2", "copies = 3\nfirst = 1"))
    assert [node.name for node in shifted.nodes] == ["big-1", "big-2", "big-3", "small"]
    assert 'name = "big-{}"\ncopies = 3\nfirst = 1\n' in format_cluster(shifted)


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        # the file
        ("version = 1", "", "version is missing; begin with version = 1"),
        ("version = 1", "version = 2", "version is 2; this zorselike reads version 1"),
        ("version = 1", "version", "is not TOML"),
        (
            "default_link",
            "defaultlink",
            "defaultlink is not a key; did you mean 'default_link'?",
        ),
        # nodes
        ("zone = ", "zones = ", "nodes[0].zones is not a key; did you mean 'zone'?"),
        ('name = "small"', "", "nodes[1].name is missing; add it"),
        ('"small"', '"big-1"', "2 nodes have the name 'big-1'; give each a name of its own"),
        ('name = "small"', 'name = ""', "a node's name is empty"),
        ('zone = "b"', 'zone = "b\\n"', "node small: zone is 'b\\n'; use printable characters"),
        (
            '"A100-40"',
            '"A100"',
            "node big-0: there is no device type 'A100'; did you mean A100-40 or A100-80?",
        ),
        ('["T4", "L4"]', '["T4", ""]', "node small: there is no device type ''; the types are T4, P100,"),
        ('["T4", "L4"]', '["T4", "L44"]', "node small: there is no device type 'L44'; did you mean 'L4'?"),
        ('["T4", "L4"]', "[]", "node small: devices is empty; give the type of each device"),
        ("count = 4", "count = 0", "nodes[0].count is 0; it must be from 1 to 256"),
        ("count = 4", "count = 4000000000", "nodes[0].count is 4000000000; it must be from 1 to 256"),
        ("copies = 2", "copies = 20000", "nodes[0].copies is 20000; it must be from 1 to 10000"),
        ("count = 4", "count = 4.0", "nodes[0].count is 4.0; it must be an integer"),
        ('device = "A100-40"', "", "nodes[0].devices or nodes[0].device, one of them must be given"),
        ('["T4", "L4"]', '["T4", "L4"]\ncount = 2', "nodes[1].count goes with device"),
        ("copies = 2", "", "node big-{}: {} in its name is for copies"),
        ("copies = 2", "first = 2", "nodes[0].first numbers copies, and there are none"),
        ("big-{}", "big", "nodes[0].name is 'big' for 2 copies; put {} once where their numbers go"),
        ('"39GiB"', '["39GiB"]', "node big-0: device_memory has 1 size for 4 devices"),
        ('"39GiB"', '"0GiB"', "node big-0: device_memory[0] is 0B; write what the machine has"),
        ('"256GiB"', "256", 'nodes[0].host_memory is 256; write a size with its unit, such as "256GiB"'),
        ('"256GiB"', '"-1GiB"', "node big-0: host_memory is -1GiB; write what"),
        ("14.5", "-1", "node big-0: price_per_hour is -1.0; give a finite number, 0 or more"),
        ("14.5", "nan", "node big-0: price_per_hour is nan"),
        ("14.5", "'14.5 USD'", "nodes[0].price_per_hour is '14.5 USD'; it must be a number"),
        (
            'zone = "b"\nregion = "east"',
            'zone = "a"\nregion = "west"',
            "zone a is in region east for node big-0",
        ),
        ('zone = "b"\nregion = "east"', 'region = "a"', "'a' is a region (node small) and a zone of another"),
        ('fabric = { bandwidth = "10GB/s" }', "", "node small: nothing says how its 2 devices are connected"),
        # bandwidths and latencies
        ('"10GB/s"', "10", "nodes[1].fabric.bandwidth is 10; write a bandwidth with its unit"),
        (
            '"10GB/s"',
            '"11TB/s"',
            "node small: fabric.bandwidth is 11TB/s; give one above 0 and up to 10TB/s, which",
        ),
        ('"50Gb/s"', '"500TB/s"', "node big-0: nic.bandwidth is 500TB/s; give one above 0 and up to 10TB/s"),
        ('"600GB/s"', '"600TB/s"', "node big-0: fabric_total is 600TB/s; give one above 0 and up to 10TB/s"),
        ('"40GB/s"', '"0B/s"', "node big-0: host_link_both is 0B/s; give one above 0"),
        ('"24GB/s"', '"-24GB/s"', "node big-0: host_link.bandwidth is -24GB/s; give one above 0"),
        ('"50us"', '"50s"', "default_link.latency is 50s; give one from 0s to 10s"),
        ('"50us"', '"-1us"', "default_link.latency is -1us; give one from 0s to 10s"),
        ('"50us"', "50", "default_link.latency is 50; write a time with its unit"),
        ('bandwidth = "10GB/s"', 'latency = "1us"', "nodes[1].fabric.bandwidth is missing; add it"),
        ('latency = "50us"', 'lateny = "50us"', "default_link.lateny is not a key; did you mean"),
        ('["64MB", ', '["1MB", ', "points have 1e+06 bytes after 1e+06; list them by rising size"),
        (
            '["64MB", "2GB/s"]',
            '["64MB"]',
            "links[0].points[1] is ['64MB']; it must be a size with its bandwidth",
        ),
        ('"2GB/s"', '"20TB/s"', "link of nodes big-1 and small: bandwidth is 20TB/s; give one above 0"),
        # links
        ('["small", "big-1"]', '["small", "big-2"]', "a link names the node 'big-2', which does not exist"),
        ('["small", "big-1"]', '["small"]', "links[0].nodes is ['small']; it must be a list of two names"),
        ('["small", "big-1"]', '["small", "small"]', "it joins a node with itself"),
        ('["b", "a"]', '["b", "c"]', "a link names the zone 'c', which does not exist; there are a, b"),
        (
            'zones = ["b", "a"]',
            'zones = ["b", "a"]\nregions = ["east"]',
            "links[1] must say once what it joins",
        ),
        ('zones = ["b", "a"]', "", "links[1] must say once what it joins: nodes, zones or regions"),
        ('zones = ["b", "a"]', 'nodes = ["small", "big-0"]', "links[1].total is for zones and regions"),
        (
            'nodes = ["small", "big-1"]',
            'zones = ["a", "b"]',
            "links[1].zones is said before of a and b; keep one of the two",
        ),
        # money
        ("0.01", "-0.01", "egress from a to b: price_per_gb is -0.01; give a finite number, 0 or more"),
        ('to = "b"', 'to = "mars"', "an egress price names the zone or region 'mars', which does not exist"),
        ('to = "b"', "", "egress[0].to is missing; add it"),
    ],
)
def test_what_cannot_be_is_refused(old: str, new: str, told: str, tmp_path: Path) -> None:
    assert old in TEXT
    path = tmp_path / "lab.toml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert told in message
    assert "\n" not in message


def test_nodes_need_not_all_be_connected() -> None:
    default = 'default_link = { bandwidth = "10Gb/s", latency = "50us" }'
    text = TEXT.replace(default, "")
    cluster = Cluster.parse(text)
    with pytest.raises(ClusterError, match="nothing says how nodes big-0 and big-1 are connected"):
        cluster.link(Place(0, 0), Place(1, 0))
    assert Cluster.parse(format_cluster(cluster)) == cluster and cluster.fingerprint


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="there is no such file; check the path of the cluster"):
        Cluster.load(tmp_path / "none.toml")
    with pytest.raises(ClusterError, match="is a directory; give the cluster file in it"):
        Cluster.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with pytest.raises(ClusterError, match="is not a text file"):
        Cluster.load(tmp_path / "binary")


def test_a_cluster_made_in_python_is_judged_when_it_is_saved(tmp_path: Path) -> None:
    node = Node(name="a", devices=("T4",))
    with pytest.raises(ClusterError, match=r"looked up as \('a', 'b'\)"):
        Cluster(nodes=(node, replace(node, name="b")), node_links={("b", "a"): Link(1e9)}).save(
            tmp_path / "x"
        )
    with pytest.raises(ClusterError, match="the cluster has no nodes"):
        Cluster(nodes=()).validate()
    with pytest.raises(ClusterError, match=r"default_link\.bandwidth is inf; give one above 0"):
        Cluster(nodes=(node,), default_link=Link(float("inf"))).validate()
    with pytest.raises(ClusterError, match="is a directory"):
        Cluster(nodes=(node,)).save(tmp_path)


@settings(max_examples=200)
@given(st.integers(0, len(TEXT) - 1), st.integers(0, 12), st.text(string.printable, max_size=4))
def test_a_slip_anywhere_is_read_or_refused_in_one_line(start: int, length: int, slip: str) -> None:
    try:
        Cluster.parse(TEXT[:start] + slip + TEXT[start + length :])
    except ClusterError as error:
        assert len(str(error).splitlines()) == 1


# -- round trip ------------------------------------------------------------------------------

NAMES = st.text(string.ascii_letters + string.digits + "-._ äµ\"'\\{}[]#=", min_size=1, max_size=6)
RATES = st.one_of(st.integers(1, 10**12).map(float), st.floats(1, 10e12))
LINKS = st.builds(
    Link,
    RATES,
    st.one_of(st.just(0.0), st.floats(0, 10), st.sampled_from([1e-5, 2.5e-4])),
    st.dictionaries(st.floats(1, 1e12), RATES, max_size=3).map(lambda points: tuple(sorted(points.items()))),
)
SIZES = st.integers(1, 2**50)
PRICES = st.floats(0, 1e4)


@st.composite
def make_nodes(draw: st.DrawFn) -> list[Node]:
    regions = draw(st.lists(NAMES, max_size=2, unique=True))
    zones = {f"z{i}": draw(st.sampled_from(["", *regions])) for i in range(draw(st.integers(0, 2)))}
    nodes: list[Node] = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
        devices = tuple(draw(st.lists(st.sampled_from(DEVICE_TYPES), min_size=1, max_size=3)))
        zone = draw(st.sampled_from(["", *zones]))
        memory = st.one_of(st.just(()), st.tuples(*[SIZES] * len(devices)))
        node = Node(
            name=name.replace("{}", ""),
            devices=devices,
            memory_bytes=draw(memory),
            zone=zone,
            region=zones[zone] if zone else draw(st.sampled_from(["", *regions])),
            price_per_hour=draw(PRICES),
            host_memory_bytes=draw(st.one_of(st.none(), SIZES)),
            host_link=draw(st.one_of(st.none(), LINKS)),
            host_link_both_bytes_per_s=draw(st.one_of(st.none(), RATES)),
            fabric=draw(LINKS),
            fabric_total_bytes_per_s=draw(st.one_of(st.none(), RATES)),
            nic=draw(st.one_of(st.none(), LINKS)),
        )
        start = draw(st.integers(0, 12))
        copies = draw(st.integers(1, 3))
        nodes += [node] if copies == 1 else [replace(node, name=f"{name}{start + i}") for i in range(copies)]
    return nodes


def pairs_of(
    draw: st.DrawFn, names: list[str], values: st.SearchStrategy[Any], *, own: bool
) -> dict[Any, Any]:
    """Some pairs of names in order, with values; `own` with pairs of a name with itself."""
    pairs = [(a, b) for a in sorted(names) for b in sorted(names) if a < b or (own and a == b)]
    return draw(st.dictionaries(st.sampled_from(pairs), values, max_size=3)) if pairs else {}


@st.composite
def make_clusters(draw: st.DrawFn) -> Cluster:
    nodes = draw(make_nodes())
    zones = sorted({node.zone for node in nodes} - {""})
    regions = sorted({node.region for node in nodes} - {""})
    both = sorted({*zones, *regions})
    return Cluster(
        nodes=tuple(nodes),
        node_links=pairs_of(draw, [node.name for node in nodes], LINKS, own=False),
        zone_links=pairs_of(draw, zones, LINKS, own=True),
        region_links=pairs_of(draw, regions, LINKS, own=True),
        default_link=draw(LINKS),
        shared_links=pairs_of(draw, zones, RATES, own=True) | pairs_of(draw, regions, RATES, own=True),
        egress_price_per_gb=draw(st.dictionaries(st.tuples(*[st.sampled_from(both)] * 2), PRICES))
        if both
        else {},
        currency=draw(NAMES),
        name=draw(st.one_of(st.just(""), NAMES)),
    )


def is_valid(cluster: Cluster) -> bool:
    try:
        cluster.validate()
    except ClusterError:
        return False  # Two names came out equal, or a region has a zone's name.
    return True


CLUSTERS = make_clusters().filter(is_valid)


@settings(max_examples=60)
@given(CLUSTERS)
def test_what_is_written_is_read_back_equal(cluster: Cluster) -> None:
    read_back = Cluster.parse(format_cluster(cluster))
    assert read_back == cluster
    assert read_back.fingerprint == cluster.fingerprint


def test_the_fingerprint_changes_with_what_is_said_and_not_with_how() -> None:
    cluster = Cluster.parse(TEXT)
    assert len(cluster.fingerprint) == 12
    reworded = TEXT.replace('"10Gb/s"', '"1.25GB/s"').replace('["b", "a"]', '["a", "b"]')
    assert Cluster.parse(reworded).fingerprint == cluster.fingerprint
    assert replace(cluster, name="another").fingerprint == cluster.fingerprint
    others = [
        replace(cluster, nodes=cluster.nodes[::-1]),
        replace(cluster, nodes=(*cluster.nodes[:2], replace(cluster.nodes[2], name="other"))),
        replace(cluster, default_link=Link(1.25e9, 6e-5)),
        replace(cluster, shared_links={}),
        replace(cluster, egress_price_per_gb={}),
        replace(cluster, currency="EUR"),
    ]
    prints = [other.fingerprint for other in others if is_valid(other)]
    assert len({cluster.fingerprint, *prints}) == 1 + len(prints) > 5
