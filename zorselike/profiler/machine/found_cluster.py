"""The cluster that was found: a `Cluster` of what runs here and what was measured of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zorselike.cost.profile import HostLinkRates, LinkTimes
from zorselike.cost.wires import fit_link
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.profiler.machine.link_pairs import Pair

_DIGITS = 4
"""Of a measured rate or latency."""


@dataclass(frozen=True)
class FoundNode:
    """One machine, as its processes describe it."""

    name: str
    devices: tuple[str, ...]
    """The type of each device, by local rank."""
    memory_bytes: tuple[int, ...]
    host_memory_bytes: int


def make_cluster(
    nodes: Sequence[FoundNode],
    *,
    host_links: Sequence[HostLinkRates],
    links: Sequence[LinkTimes],
    stands_for: Mapping[Pair, Sequence[Pair]],
) -> Cluster:
    """Nodes with what was measured of them; a pair that was not measured gets the link of the one that
    stands for it."""
    fitted: dict[Pair, Link] = {}
    measured = {times.between: times for times in links}
    for pair, alike in stands_for.items():
        if pair in measured:
            link = _round_link(fit_link(measured[pair]))
            fitted |= dict.fromkeys(alike, link)
    fitted |= {
        pair: _round_link(fit_link(times)) for pair, times in measured.items() if set(pair) <= _names(nodes)
    }
    rates = {entry.device: entry for entry in host_links}
    return Cluster(
        nodes=tuple(_make_node(node, rates, fitted.get((node.name, node.name))) for node in nodes),
        node_links={pair: link for pair, link in fitted.items() if pair[0] != pair[1]},
    )


def _names(nodes: Sequence[FoundNode]) -> set[str]:
    return {node.name for node in nodes}


def _make_node(found: FoundNode, rates: Mapping[str, HostLinkRates], fabric: Link | None) -> Node:
    known = [rates[device] for device in found.devices if device in rates]
    # A node has one host link for all its devices: that of the slowest kind.
    host = min(known, key=lambda entry: min(entry.to_device, entry.to_host), default=None)
    return Node(
        name=found.name,
        devices=found.devices,
        memory_bytes=found.memory_bytes,
        host_memory_bytes=found.host_memory_bytes,
        host_link=None if host is None else Link(_round(min(host.to_device, host.to_host))),
        host_link_both_bytes_per_s=None if host is None else _round(host.both),
        fabric=fabric,
    )


def _round_link(link: Link) -> Link:
    """With the digits that a measurement has, in a file that people read and edit."""
    points = tuple((size, _round(rate)) for size, rate in link.points)
    return Link(_round(link.bandwidth_bytes_per_s), _round(link.latency_s), points)


def _round(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
