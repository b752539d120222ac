"""Clusters as TOML: reading and the fingerprint; `plan/cluster/text.py` writes them.

Sizes, bandwidths and times are strings with their units (`text/units.py`), since a bare number would not say
whether it means bits or bytes. Additions of the file to the dataclasses in `plan/cluster/cluster.py`:

- a node's `device = "T4"` with `count = 8` stands for `devices` with eight of them;
- `copies = 8` on a node whose name has `{}` stands for eight nodes, numbered from 0, or from `first`;
- a link's curve is `points = [["1MB", "1.2GB/s"], ...]` or a `fit` (`plan/cluster/link_curve.py`); its
  bandwidth, if none is given, is then the most that the curve reaches;
- one name in `zones` or `regions` of a link means inside it, and `total` is what all traffic shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zorselike.errors import ClusterError, FileError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.cluster.link_curve import tabulate_fit
from zorselike.plan.cluster.text import CLUSTER_VERSION, describe_cluster, format_cluster
from zorselike.plan.cluster.validate import validate_cluster
from zorselike.text.files import hash_content, read_text, write_text
from zorselike.text.tables import (
    check_keys,
    check_version,
    read,
    read_int,
    read_list,
    read_number,
    read_numbers,
    read_optional,
    read_str,
    read_strings,
    read_table,
    read_tables,
    wrong_type,
)
from zorselike.text.toml import parse_toml
from zorselike.text.units import read_memory, read_rate, read_size, read_time

CLUSTER_KEYS = ("version", "name", "currency", "default_link", "nodes", "links", "egress")
LINK_KEYS = ("bandwidth", "latency", "points", "fit")
FIT_KEYS = ("coefficients", "max", "from", "to")
ENDS = ("nodes", "zones", "regions")
EGRESS_KEYS = ("from", "to", "price_per_gb")
NODE_KEYS = (
    "name",
    "copies",
    "first",
    "device",
    "count",
    "devices",
    "device_memory",
    "zone",
    "region",
    "price_per_hour",
    "host_memory",
    "host_link",
    "host_link_both",
    "fabric",
    "fabric_total",
    "nic",
)

MAX_COUNT, MAX_COPIES = 256, 10_000
"""Devices of a node and nodes alike that are no slip."""

Pair = tuple[str, str]


def load_cluster(path: str | Path) -> Cluster:
    """Reads and validates a cluster file.

    Raises:
        ClusterError: The file cannot be read, is not TOML, has an unknown key, a value of the wrong type
            or unit, or describes no possible cluster. Names file, key and mend.
    """
    try:
        return parse_cluster(read_text(path, "cluster"))
    except (FileError, ClusterError) as error:
        raise ClusterError(f"{path}: {error}") from None


def parse_cluster(text: str) -> Cluster:
    """The cluster that a TOML text says, validated; raises `ClusterError`."""
    try:
        cluster = _read_cluster(parse_toml(text))
    except FileError as error:
        raise ClusterError(str(error)) from None
    validate_cluster(cluster)
    return cluster


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Writes a valid cluster as TOML that `load_cluster` reads back equal, whole or not at all.

    Raises:
        ClusterError: The cluster contradicts itself, or the file cannot be written.
    """
    validate_cluster(cluster)
    text = f"# cluster {cluster.fingerprint}: {describe_cluster(cluster)}\n{format_cluster(cluster)}"
    try:
        write_text(path, text)
    except FileError as error:
        raise ClusterError(f"{path}: {error}") from None


def fingerprint(cluster: Cluster) -> str:
    """Twelve hex digits of a hash over all but the cluster's name, however it is written in the file.

    Raises `ClusterError` if the cluster contradicts itself.
    """
    validate_cluster(cluster)
    return hash_content(format_cluster(replace(cluster, name="")))


# -- reading ---------------------------------------------------------------------------------


def _read_cluster(table: Mapping[str, Any]) -> Cluster:
    check_keys(table, "", CLUSTER_KEYS, "cluster")
    check_version(table, CLUSTER_VERSION, f'write "version = {CLUSTER_VERSION}" on the first line')
    nodes = [
        node
        for i, each in enumerate(read(table, "nodes", read_tables))
        for node in _read_nodes(each, f"nodes[{i}].")
    ]
    links: dict[str, dict[Pair, Link]] = {end: {} for end in ENDS}
    shared: dict[Pair, float] = {}
    for i, each in enumerate(read_optional(table, "links", read_tables, ())):
        _read_joined(each, f"links[{i}].", links, shared)
    return Cluster(
        nodes=tuple(nodes),
        node_links=links["nodes"],
        zone_links=links["zones"],
        region_links=links["regions"],
        default_link=read_optional(table, "default_link", _read_link_table, None),
        shared_links=shared,
        egress_price_per_gb=read_optional(table, "egress", _read_egress, {}),
        currency=read_optional(table, "currency", read_str, Cluster.currency),
        name=read_optional(table, "name", read_str, ""),
    )


def _read_nodes(table: Mapping[str, Any], where: str) -> list[Node]:
    """The node that a table says, or its copies."""
    check_keys(table, where, NODE_KEYS, "node")
    devices = _read_devices(table, where)
    node = Node(
        name=read(table, "name", read_str, where),
        devices=devices,
        memory_bytes=_read_memory(table, where, len(devices)),
        zone=read_optional(table, "zone", read_str, "", where),
        region=read_optional(table, "region", read_str, "", where),
        price_per_hour=read_optional(table, "price_per_hour", read_number, 0.0, where),
        host_memory_bytes=read_optional(table, "host_memory", read_memory, None, where),
        host_link=read_optional(table, "host_link", _read_link_table, None, where),
        host_link_both_bytes_per_s=read_optional(table, "host_link_both", read_rate, None, where),
        fabric=read_optional(table, "fabric", _read_link_table, None, where),
        fabric_total_bytes_per_s=read_optional(table, "fabric_total", read_rate, None, where),
        nic=read_optional(table, "nic", _read_link_table, None, where),
    )
    copies = None
    if "copies" in table:
        copies = _read_count(table, "copies", MAX_COPIES, where)
    first = read_optional(table, "first", read_int, 0, where)
    if copies is None:
        if "first" in table:
            raise FileError(f"{where}first numbers copies, and there are none; add copies or leave it out")
        return [node]
    if node.name.count("{}") != 1:
        raise FileError(
            f"{where}name is {node.name!r} for {copies} copies; put {{}} once where their numbers go, "
            f"such as '{node.name.replace('{}', '')}-{{}}'"
        )
    return [replace(node, name=node.name.replace("{}", str(first + i))) for i in range(copies)]


def _read_devices(table: Mapping[str, Any], where: str) -> tuple[str, ...]:
    if ("devices" in table) == ("device" in table):
        raise FileError(
            f"{where}devices or {where}device, one of them must be given: "
            'devices = ["T4", "L4"], or device = "T4" with count = 8'
        )
    if "devices" in table:
        if "count" in table:
            raise FileError(f"{where}count goes with device; with devices list each, or leave count out")
        return read(table, "devices", read_strings, where)
    type = read(table, "device", read_str, where)
    return (type,) * (_read_count(table, "count", MAX_COUNT, where) if "count" in table else 1)


def _read_memory(table: Mapping[str, Any], where: str, num_devices: int) -> tuple[int, ...]:
    """One size for all devices, or a list with one for each."""
    value = table.get("device_memory")
    if isinstance(value, list):
        return tuple(read_memory(size, f"{where}device_memory[{i}]") for i, size in enumerate(value))
    return () if value is None else (read_memory(value, f"{where}device_memory"),) * num_devices


def _read_count(table: Mapping[str, Any], key: str, most: int, where: str) -> int:
    number = read(table, key, read_int, where)
    if not 1 <= number <= most:
        raise FileError(f"{where}{key} is {number}; it must be from 1 to {most}")
    return number


# -- links -----------------------------------------------------------------------------------


def _read_joined(
    table: Mapping[str, Any], where: str, links: dict[str, dict[Pair, Link]], shared: dict[Pair, float]
) -> None:
    """Enters one of `[[links]]` where it belongs."""
    check_keys(table, where, (*ENDS, *LINK_KEYS, "total"), "link")
    ends = [end for end in ENDS if end in table]
    if len(ends) != 1:
        raise FileError(
            f"{where.rstrip('.')} must say once what it joins: nodes, zones or regions, as in "
            'zones = ["a", "b"]'
        )
    (end,) = ends
    pair = _read_pair(table[end], f"{where}{end}", may_be_one=end != "nodes")
    has_link = any(key in table for key in LINK_KEYS)
    if "total" in table:
        if end == "nodes":
            raise FileError(f"{where}total is for zones and regions; bound a node's traffic by its nic")
        _refuse_second(pair, shared, f"{where}total")
        shared[pair] = read(table, "total", read_rate, where)
    if has_link or "total" not in table:
        _refuse_second(pair, links[end], f"{where}{end}")
        links[end][pair] = _read_link({k: v for k, v in table.items() if k in LINK_KEYS}, where)


def _read_pair(value: object, where: str, *, may_be_one: bool) -> Pair:
    names = read_strings(value, where)
    if len(names) != 2 and not (may_be_one and len(names) == 1):
        one = ", or one name for inside it" if may_be_one else ""
        raise wrong_type(where, value, f"a list of two names{one}")
    return min(names), max(names)


def _refuse_second(pair: Pair, known: Mapping[Pair, object], where: str) -> None:
    if pair in known:
        raise FileError(f"{where} is said before of {pair[0]} and {pair[1]}; keep one of the two")


def _read_link_table(value: object, where: str) -> Link:
    table = read_table(value, where)
    check_keys(table, f"{where}.", LINK_KEYS, "link")
    return _read_link(table, f"{where}.")


def _read_link(table: Mapping[str, Any], where: str) -> Link:
    if "points" in table and "fit" in table:
        raise FileError(f"{where}points and {where}fit are both given; keep one of them")
    points = read_optional(table, "points", _read_points, (), where)
    points = read_optional(table, "fit", _read_fit, points, where)
    if points and "bandwidth" not in table:
        bandwidth = max(rate for _, rate in points)
    else:
        bandwidth = read(table, "bandwidth", read_rate, where)
    return Link(bandwidth, read_optional(table, "latency", read_time, 0.0, where), points)


def _read_points(value: object, where: str) -> tuple[tuple[float, float], ...]:
    expected = 'a list of sizes with their bandwidth, [["1MB", "1.2GB/s"], ...]'
    points = []
    for i, item in enumerate(read_list(value, where, expected)):
        if not isinstance(item, list) or len(item) != 2:
            raise wrong_type(f"{where}[{i}]", item, 'a size with its bandwidth, ["1MB", "1.2GB/s"]')
        points.append((read_size(item[0], f"{where}[{i}][0]"), read_rate(item[1], f"{where}[{i}][1]")))
    if not points:
        raise FileError(f"{where} is empty; list sizes, or leave it out for the bandwidth at every size")
    return tuple(points)


def _read_fit(value: object, where: str) -> tuple[tuple[float, float], ...]:
    table = read_table(value, where)
    check_keys(table, f"{where}.", FIT_KEYS, "fit")
    coefficients = read(table, "coefficients", read_numbers, f"{where}.")
    if len(coefficients) != 3:
        raise wrong_type(
            f"{where}.coefficients", list(coefficients), "[a, b, c] of GB/s = a log2(MB)^2 + b log2(MB) + c"
        )
    try:
        return tabulate_fit(
            coefficients,
            max_bytes_per_s=read(table, "max", read_rate, f"{where}."),
            smallest_bytes=read(table, "from", read_size, f"{where}."),
            largest_bytes=read(table, "to", read_size, f"{where}."),
        )
    except ClusterError as error:
        raise FileError(f"{where}: {error}") from None


def _read_egress(value: object, key: str) -> dict[Pair, float]:
    prices: dict[Pair, float] = {}
    for i, table in enumerate(read_tables(value, key)):
        where = f"{key}[{i}]."
        check_keys(table, where, EGRESS_KEYS, "egress price")
        pair = (read(table, "from", read_str, where), read(table, "to", read_str, where))
        if pair in prices:
            raise FileError(
                f"{where}from and to say {pair[0]} to {pair[1]} a second time; keep one of the two"
            )
        prices[pair] = read(table, "price_per_gb", read_number, where)
    return prices
