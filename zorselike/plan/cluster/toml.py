"""Clusters as TOML.

Sizes, bandwidths and times are strings with their units (`text/units.py`), since a bare number would not say
whether it means bits or bytes. Additions of the file to the dataclasses in `plan/cluster/parts.py`:

- a node's `device = "T4"` with `count = 8` stands for `devices` with eight of them;
- `copies = 8` on a node whose name has `{}` stands for eight nodes, numbered from 0, or from `first`;
- a link's curve is `points = [["1MB", "1.2GB/s"], ...]` or a `fit` (`plan/cluster/link_curve.py`); its
  bandwidth, if none is given, is then the most that the curve reaches;
- one name in `zones` or `regions` of a link means inside it, and `total` is what all traffic shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from zorselike.errors import ClusterError, FileError
from zorselike.plan.cluster.link_curve import tabulate_fit
from zorselike.plan.cluster.parts import Link, Node
from zorselike.text.annotations import RATE, SIZE, Key
from zorselike.text.dataclass_tables import (
    check_keys,
    list_keys,
    read_dataclass,
    read_table,
    read_value,
    write_dataclass,
    wrong_value,
)
from zorselike.text.toml import format_table
from zorselike.text.units import read_memory, read_rate, show_rate
from zorselike.text.wording import count, split_runs

if TYPE_CHECKING:
    from zorselike.plan.cluster.cluster import Cluster

MAX_COUNT, MAX_COPIES = 256, 10_000
"""Devices of a node and nodes alike that are no slip."""

ENDS = ("nodes", "zones", "regions")

Pair = tuple[str, str]


# -- nodes -----------------------------------------------------------------------------------


def _read_nodes(value: object, where: str) -> tuple[Node, ...]:
    entries = read_value(tuple[dict[str, Any], ...], value, where)
    return tuple(node for i, entry in enumerate(entries) for node in _read_copies(entry, f"{where}[{i}]"))


def _read_copies(table: Mapping[str, Any], where: str) -> list[Node]:
    """The node that a table says, or its copies."""
    extra = ("copies", "first", "device", "count", "devices", "device_memory")
    node = read_dataclass(Node, table, where, readers=READERS, extra=extra, devices=(), memory_bytes=())
    devices = _read_devices(table, where)
    node = replace(node, devices=devices, memory_bytes=_read_memory(table, where, len(devices)))
    first = read_value(int, table.get("first", 0), f"{where}.first")
    if "copies" not in table:
        if "first" in table:
            raise FileError(f"{where}.first numbers copies, and there are none; add copies or leave it out")
        return [node]
    copies = _read_count(table, "copies", MAX_COPIES, where)
    if node.name.count("{}") != 1:
        raise FileError(
            f"{where}.name is {node.name!r} for {copies} copies; put {{}} once where their numbers go, "
            f"such as '{node.name.replace('{}', '')}-{{}}'"
        )
    return [replace(node, name=node.name.replace("{}", str(first + i))) for i in range(copies)]


def _read_devices(table: Mapping[str, Any], where: str) -> tuple[str, ...]:
    if ("devices" in table) == ("device" in table):
        raise FileError(
            f"{where}.devices or {where}.device, one of them must be given: "
            'devices = ["T4", "L4"], or device = "T4" with count = 8'
        )
    if "devices" not in table:
        type: str = read_value(str, table["device"], f"{where}.device")
        return (type,) * _read_count(table, "count", MAX_COUNT, where)
    if "count" in table:
        raise FileError(f"{where}.count goes with device; with devices list each, or leave count out")
    devices: tuple[str, ...] = read_value(tuple[str, ...], table["devices"], f"{where}.devices")
    return devices


def _read_memory(table: Mapping[str, Any], where: str, num_devices: int) -> tuple[int, ...]:
    """One size for all devices, or a list with one for each."""
    value = table.get("device_memory")
    if isinstance(value, list):
        return tuple(read_memory(size, f"{where}.device_memory[{i}]") for i, size in enumerate(value))
    return () if value is None else (read_memory(value, f"{where}.device_memory"),) * num_devices


def _read_count(table: Mapping[str, Any], key: str, most: int, where: str) -> int:
    number: int = read_value(int, table.get(key, 1), f"{where}.{key}")
    if not 1 <= number <= most:
        raise FileError(f"{where}.{key} is {number}; it must be from 1 to {most}")
    return number


# -- links -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fit:
    """Sailor's way to write a link's curve (`link_curve.py`)."""

    coefficients: Annotated[tuple[float, float, float], "[a, b, c] of GB/s = a log2(MB)^2 + b log2(MB) + c"]
    max: Annotated[float, RATE]
    from_: Annotated[float, SIZE, Key("from")]
    to: Annotated[float, SIZE]


@dataclass(frozen=True)
class _Egress:
    from_: Annotated[str, Key("from")]
    to: str
    price_per_gb: float


def read_links(table: Mapping[str, Any]) -> dict[str, Mapping[Pair, Any]]:
    """The fields of a `Cluster` that its `[[links]]` and `[[egress]]` say; raises `FileError`."""
    links: dict[str, dict[Pair, Link]] = {end: {} for end in ENDS}
    shared: dict[Pair, float] = {}
    for i, entry in enumerate(read_value(tuple[dict[str, Any], ...], table.get("links", []), "links")):
        _read_joined(entry, f"links[{i}]", links, shared)
    prices: dict[Pair, float] = {}
    for i, egress in enumerate(read_value(tuple[_Egress, ...], table.get("egress", []), "egress")):
        pair = (egress.from_, egress.to)
        if pair in prices:
            raise FileError(
                f"egress[{i}].from and to say {pair[0]} to {pair[1]} a second time; keep one of the two"
            )
        prices[pair] = egress.price_per_gb
    return {
        "node_links": links["nodes"],
        "zone_links": links["zones"],
        "region_links": links["regions"],
        "shared_links": shared,
        "egress_price_per_gb": prices,
    }


def _read_joined(
    table: Mapping[str, Any], where: str, links: dict[str, dict[Pair, Link]], shared: dict[Pair, float]
) -> None:
    """Enters one of `[[links]]` where it belongs."""
    keys = (*list_keys(Link), "fit")
    check_keys(table, where, (*ENDS, *keys, "total"))
    ends = [end for end in ENDS if end in table]
    if len(ends) != 1:
        raise FileError(
            f'{where} must say once what it joins: nodes, zones or regions, as in zones = ["a", "b"]'
        )
    (end,) = ends
    pair = _read_pair(table[end], f"{where}.{end}", may_be_one=end != "nodes")
    if "total" in table:
        if end == "nodes":
            raise FileError(f"{where}.total is for zones and regions; bound a node's traffic by its nic")
        _refuse_second(pair, shared, f"{where}.total")
        shared[pair] = read_rate(table["total"], f"{where}.total")
    link = {key: value for key, value in table.items() if key in keys}
    if link or "total" not in table:
        _refuse_second(pair, links[end], f"{where}.{end}")
        links[end][pair] = _read_link(link, where)


def _read_pair(value: object, where: str, *, may_be_one: bool) -> Pair:
    names = read_value(tuple[str, ...], value, where)
    if len(names) != 2 and not (may_be_one and len(names) == 1):
        one = ", or one name for inside it" if may_be_one else ""
        raise wrong_value(where, value, f"a list of two names{one}")
    return min(names), max(names)


def _refuse_second(pair: Pair, known: Mapping[Pair, object], where: str) -> None:
    if pair in known:
        raise FileError(f"{where} is said before of {pair[0]} and {pair[1]}; keep one of the two")


def _read_link(value: object, where: str) -> Link:
    table = {**read_table(value, where)}
    if "points" in table and "fit" in table:
        raise FileError(f"{where}.points and {where}.fit are both given; keep one of them")
    curve = {key: table[key] for key in ("points", "fit") if key in table}
    if not curve or "bandwidth" in table:
        link = read_dataclass(Link, table, where, extra=("fit",))
    else:
        link = read_dataclass(Link, table, where, extra=("fit",), bandwidth_bytes_per_s=0.0)
    if "fit" in table:
        link = replace(link, points=_read_fit(table["fit"], f"{where}.fit"))
    if curve and not link.points:
        raise FileError(
            f"{where}.points is empty; list sizes, or leave it out for the bandwidth at every size"
        )
    if curve and "bandwidth" not in table:
        link = replace(link, bandwidth_bytes_per_s=max(rate for _, rate in link.points))
    return link


def _read_fit(value: object, where: str) -> tuple[tuple[float, float], ...]:
    fit = read_dataclass(_Fit, value, where)
    try:
        return tabulate_fit(
            fit.coefficients, max_bytes_per_s=fit.max, smallest_bytes=fit.from_, largest_bytes=fit.to
        )
    except ClusterError as error:
        raise FileError(f"{where}: {error}") from None


READERS = {tuple[Node, ...]: _read_nodes, Link: _read_link}
"""What is not read by annotations alone."""


# -- writing ---------------------------------------------------------------------------------


def describe_cluster(cluster: Cluster) -> str:
    """`2 nodes: 8 T4, 4 A100-40`."""
    types = Counter(type for node in cluster.nodes for type in node.devices)
    devices = ", ".join(f"{number} {type}" for type, number in types.items())
    return f"{count(len(cluster.nodes), 'node')}: {devices}"


def format_cluster(cluster: Cluster) -> str:
    """A cluster as TOML; equal clusters give equal texts. Nodes that are alike and numbered in a row are
    one entry."""
    lines = format_table(
        {
            "version": cluster.version,
            "name": cluster.name or None,
            "currency": cluster.currency,
            "default_link": cluster.default_link and _write_link(cluster.default_link),
        }
    )
    for nodes in split_runs(cluster.nodes, _follows):
        lines += ["", "[[nodes]]", *format_table(_write_nodes(nodes))]
    shared = {pair: show_rate(total) for pair, total in sorted(cluster.shared_links.items())}
    for key, links in (
        ("nodes", cluster.node_links),
        ("zones", cluster.zone_links),
        ("regions", cluster.region_links),
    ):
        for pair, link in sorted(links.items()):
            total = shared.pop(pair, None) if key != "nodes" else None
            values = {key: pair, **_write_link(link), "total": total}
            lines += ["", "[[links]]", *format_table(values)]
    zones = {node.zone for node in cluster.nodes}
    for pair, total in shared.items():
        key = "zones" if zones.issuperset(pair) else "regions"
        lines += ["", "[[links]]", *format_table({key: pair, "total": total})]
    for (source, target), price in sorted(cluster.egress_price_per_gb.items()):
        egress = write_dataclass(_Egress(source, target, price))
        lines += ["", "[[egress]]", *format_table(egress)]
    return "\n".join(lines) + "\n"


def _write_link(link: Link) -> dict[str, Any]:
    return write_dataclass(link, omit_defaults=True)


def _write_nodes(nodes: Sequence[Node]) -> dict[str, object]:
    """The keys of nodes that differ only in their numbers."""
    node, copies = nodes[0], len(nodes)
    prefix, number = _split_number(node.name)
    table = write_dataclass(node, omit_defaults=True)
    alike = len(set(node.devices)) == 1
    memory = table.pop("device_memory", None)
    head = {
        "name": node.name if copies == 1 else f"{prefix}{{}}",
        "copies": copies if copies > 1 else None,
        "first": number if copies > 1 and number else None,
        "device": node.devices[0] if alike else None,
        "count": len(node.devices) if alike and len(node.devices) > 1 else None,
        "devices": None if alike else node.devices,
        "device_memory": memory[0] if memory and len(set(memory)) == 1 else memory,
    }
    return head | {key: value for key, value in table.items() if key not in head}


def _follows(before: Node, node: Node) -> bool:
    """Whether two nodes are equal but for their names, which are numbered one after the other."""
    if replace(before, name=node.name) != node:
        return False
    (prefix, number), (next_prefix, next_number) = _split_number(before.name), _split_number(node.name)
    return prefix == next_prefix and number is not None and next_number == number + 1


def _split_number(name: str) -> tuple[str, int | None]:
    """`v100-` and 7 of `v100-7`; no number where writing it again would not give the name."""
    prefix = name.rstrip("0123456789")
    digits = name[len(prefix) :]
    return (
        (prefix, int(digits)) if digits.isascii() and digits and str(int(digits)) == digits else (name, None)
    )
