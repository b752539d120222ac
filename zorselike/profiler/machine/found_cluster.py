"""The cluster that was found: a `Cluster` of what runs here and what was measured of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zorselike.cost.profile import HostLinkRates, LinkTimes
from zorselike.cost.wires import fit_link
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.profiler.machine.link_timing import Pair

_DIGITS = 4
"""Of a measured rate or latency."""


def make_cluster(
    nodes: Sequence[Node],
    *,
    host_links: Sequence[HostLinkRates],
    links: Sequence[LinkTimes],
    stands_for: Mapping[Pair, Sequence[Pair]],
) -> Cluster:
    """Nodes with what was measured of them; a pair that was not measured gets the link of the one that
    stands for it."""
    names = {node.name for node in nodes}
    measured = {times.between: _round_link(fit_link(times)) for times in links if set(times.between) <= names}
    fitted: dict[Pair, Link] = {}
    for pair, alike in stands_for.items():
        if pair in measured:
            fitted |= dict.fromkeys(alike, measured[pair])
    fitted |= measured
    rates = {entry.device: entry for entry in host_links}
    return Cluster(
        nodes=tuple(_add_links(node, rates, fitted.get((node.name, node.name))) for node in nodes),
        node_links={pair: link for pair, link in fitted.items() if pair[0] != pair[1]},
    )


def _add_links(node: Node, rates: Mapping[str, HostLinkRates], fabric: Link | None) -> Node:
    known = [rates[device] for device in node.devices if device in rates]
    if not known:
        return replace(node, fabric=fabric)
    # A node has one host link for all its devices: that of the slowest kind.
    host = min(known, key=lambda entry: min(entry.to_device, entry.to_host))
    return replace(
        node,
        host_link=Link(_round(min(host.to_device, host.to_host))),
        host_link_both_bytes_per_s=_round(host.both),
        fabric=fabric,
    )


def list_machines(machines: Mapping[str, Sequence[str]]) -> str:
    """`a: T4 T4, b: V100-16`, from the types of each node's devices."""
    return ", ".join(f"{node}: {' '.join(types)}" for node, types in sorted(machines.items()))


def _round_link(link: Link) -> Link:
    """With the digits that a measurement has, in a file that people read and edit."""
    points = tuple((size, _round(rate)) for size, rate in link.points)
    return Link(_round(link.bandwidth_bytes_per_s), _round(link.latency_s), points)


def _round(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
