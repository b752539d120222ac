"""Which capacities a cluster has, and how its devices are joined: what makes a `Network`.

A node has its network card in and out; inside it each device has the fabric in and out, or all share one
(PCIe); two regions (or zones) may share a link each way; the link of two nodes is a capacity of its own
where it carries less than their network cards. Each device has its way to the host's memory, each
direction by itself and, where they share the bus, both together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from zorselike.cost.catalogue import find_device
from zorselike.cost.curves import Curve, fit_curve
from zorselike.cost.network import HostWire, Network, Port, Wire
from zorselike.cost.profile import CollectiveTimes, HostLinkRates, LinkTimes, Profile
from zorselike.errors import ClusterError, ProfileError
from zorselike.plan.cluster.cluster import Cluster, Link, Place

REACHED_OF_BUS = 0.8
"""What copies reach of the catalogue's rate in theory."""
MANY_NODES = 64
"""Beyond so many, wires are made when they are asked for: of a thousand nodes a million pairs could be."""


def make_network(cluster: Cluster, places: Sequence[Place], profile: Profile | None = None) -> Network:
    """The network between devices of a cluster, `places` by rank; `profile` for what was measured."""
    profile = profile or Profile(model="")
    measured = {times.between: fit_link(times) for times in profile.links}
    rates = {rates.device: rates for rates in profile.host_links}
    layout = _Layout(cluster, places, measured)
    ports = tuple(layout.add_port(place, rates.get(cluster.device_type(place))) for place in places)
    wires = layout.add_wires()
    return Network(
        capacities=layout.capacities,
        names=layout.names,
        cluster=cluster,
        places=tuple(places),
        ports=ports,
        wires=wires,
        collectives={(t.op, t.devices, t.num_nodes): _fit_collective(t) for t in profile.collectives},
    )


def fit_link(times: LinkTimes) -> Link:
    """Rate and latency of a link from measured seconds; the latency is what no bytes at all would take by
    the two smallest sizes, the bandwidth the most that is reached where bytes take half of the time or more
    (of a few bytes the time is all latency and noise). Raises `ProfileError` if no time is above zero."""
    name = f"link {times.between[0]} - {times.between[1]}"
    curve = fit_curve(times.num_bytes, times.seconds, name=name)
    points = [(size, seconds) for size, seconds in curve.points if size > 0 and seconds > 0]
    if not points:
        raise ProfileError(f"{name}: no size and time above zero; measure it again")
    latency = 0.0
    if len(points) > 1:
        (size, seconds), (next_size, next_seconds) = points[:2]
        latency = max(0.0, seconds - size * (next_seconds - seconds) / (next_size - size))
    rates = [(size, size / (seconds - latency)) for size, seconds in points if seconds > latency]
    if not rates:
        latency, rates = 0.0, [(size, size / seconds) for size, seconds in points]
    moving = [size for size, seconds in points if seconds >= 2 * latency]
    reached = [rate for size, rate in rates if size in moving] or [rates[-1][1]]
    bandwidth = max(reached)
    return Link(bandwidth, latency, tuple((size, min(rate, bandwidth)) for size, rate in rates))


def _fit_collective(times: CollectiveTimes) -> Curve:
    name = f"{times.op} of {', '.join(times.devices)} over {times.num_nodes} nodes"
    return fit_curve(times.num_bytes, times.seconds, name=name)


class _Layout:
    """The capacities of a cluster as they are numbered, those that ranks may use."""

    def __init__(
        self, cluster: Cluster, places: Sequence[Place], measured: Mapping[tuple[str, str], Link]
    ) -> None:
        self.capacities: list[float] = []
        self.names: list[str] = []
        self._cluster = cluster
        self._measured = measured
        self._places_of: defaultdict[int, list[Place]] = defaultdict(list)
        for place in places:
            self._places_of[place.node].append(place)
        self._fabrics: dict[int, int] = {}
        """Nodes whose devices share one."""
        self._shared: dict[tuple[str, str], int] = {}
        self._cards: dict[int, tuple[int, int] | None] = {}

    def _add(self, name: str, bytes_per_s: float) -> int:
        self.names.append(name)
        self.capacities.append(bytes_per_s)
        return len(self.names) - 1

    # -- inside a node ---------------------------------------------------------------------

    def add_port(self, place: Place, rates: HostLinkRates | None) -> Port:
        """What one device has for itself, or shares with its neighbours."""
        node = self._cluster.nodes[place.node]
        name = f"node {node.name}, device {place.local_rank}"
        host = self._add_host(place, name, rates)
        fabric = self._find_fabric(place.node)
        if fabric is None:
            return Port(None, None, host)
        if node.fabric_total_bytes_per_s is not None:
            if place.node not in self._fabrics:
                total = max(node.fabric_total_bytes_per_s, fabric.bandwidth_bytes_per_s)
                self._fabrics[place.node] = self._add(f"node {node.name}, fabric", total)
            shared = self._fabrics[place.node]
            return Port(shared, shared, host)
        bandwidth = fabric.bandwidth_bytes_per_s
        return Port(self._add(f"{name}, out", bandwidth), self._add(f"{name}, in", bandwidth), host)

    def _find_fabric(self, node: int) -> Link | None:
        """What joins the devices of a node; None for one alone, or where nothing says it."""
        own = self._places_of[node]
        return self._find_link(own[0], own[1]) if len(own) > 1 else None

    def _add_host(self, place: Place, name: str, rates: HostLinkRates | None) -> HostWire | None:
        node = self._cluster.nodes[place.node]
        both = node.host_link_both_bytes_per_s
        if rates is not None:
            to_device, to_host, both = Link(rates.to_device), Link(rates.to_host), rates.both
        elif node.host_link is not None:
            to_device = to_host = node.host_link
        else:
            try:
                spec = find_device(self._cluster.device_type(place))
            except ClusterError:
                return None  # An unknown device is an error only where something is offloaded.
            to_device = to_host = Link(REACHED_OF_BUS * spec.host_link_bytes_per_s)
        down, up = to_device.bandwidth_bytes_per_s, to_host.bandwidth_bytes_per_s
        load, store = [self._add(f"{name}, from host", down)], [self._add(f"{name}, to host", up)]
        if both is not None and both < down + up:
            # Copies one way alone are not slowed down by what both ways reach together.
            shared = self._add(f"{name}, host both ways", max(both, down, up))
            load.append(shared)
            store.append(shared)
        return HostWire(to_device, to_host, tuple(load), tuple(store))

    # -- between nodes ---------------------------------------------------------------------

    def add_wires(self) -> Mapping[tuple[int, int], Wire]:
        """All pairs of nodes that are connected, and the fabrics; of many nodes each when it is asked for."""
        nodes = sorted(self._places_of)
        self._cards = {node: self._add_card(node) for node in nodes}
        wires = _Wires(self, nodes)
        return wires if len(nodes) > MANY_NODES else dict(wires.items())

    def find_wire(self, a: int, b: int) -> Wire | None:
        """None where nothing joins two nodes."""
        if a == b:
            fabric = self._find_fabric(a)
            return None if fabric is None else Wire(fabric, ())
        link = self._find_link(self._places_of[a][0], self._places_of[b][0])
        return None if link is None else Wire(link, self._capacities_between(a, b, link))

    def _add_card(self, node: int) -> tuple[int, int] | None:
        """Capacities out and in; what was measured of one link, its card carries."""
        nic, name = self._cluster.nodes[node].nic, self._cluster.nodes[node].name
        if nic is None or len(self._places_of) == 1:
            return None
        present = {self._cluster.nodes[other].name for other in self._places_of} if self._measured else {name}
        reached = [
            measured.bandwidth_bytes_per_s
            for pair, measured in self._measured.items()
            if name in pair and pair[0] != pair[1] and present.issuperset(pair)
        ]
        bandwidth = max([nic.bandwidth_bytes_per_s, *reached])
        return self._add(f"node {name}, out", bandwidth), self._add(f"node {name}, in", bandwidth)

    def _capacities_between(self, a: int, b: int, link: Link) -> tuple[int, ...]:
        leaves, enters = self._cards[a], self._cards[b]
        own = [card[way] for card, way in ((leaves, 0), (enters, 1)) if card is not None]
        narrowest = min((self.capacities[index] for index in own), default=None)
        if narrowest is None or link.bandwidth_bytes_per_s < narrowest:
            first, second = self._cluster.nodes[a].name, self._cluster.nodes[b].name
            own.append(self._add(f"nodes {first} - {second}", link.bandwidth_bytes_per_s))
        return (*own, *self._find_shared(a, b))

    def _find_shared(self, a: int, b: int) -> list[int]:
        """What all traffic from one region or zone to another has together."""
        first, second = self._cluster.nodes[a], self._cluster.nodes[b]
        found = []
        for word, x, y in (("regions", first.region, second.region), ("zones", first.zone, second.zone)):
            bytes_per_s = self._cluster.shared_links.get((min(x, y), max(x, y)))
            if bytes_per_s is None or not x or not y:
                continue
            if (x, y) not in self._shared:
                self._shared[x, y] = self._add(f"{word} {x} - {y}", bytes_per_s)
            found.append(self._shared[x, y])
        return list(dict.fromkeys(found))

    def _find_link(self, a: Place, b: Place) -> Link | None:
        """As measured, else as the cluster says; None where nothing is known."""
        measured = self._find_measured(a.node, b.node)
        try:
            given = self._cluster.link(a, b)
        except ClusterError:
            return measured
        if measured is None:
            return given
        bandwidth = max(given.bandwidth_bytes_per_s, measured.bandwidth_bytes_per_s)
        return Link(bandwidth, measured.latency_s, measured.points)

    def _find_measured(self, a: int, b: int) -> Link | None:
        first, second = self._cluster.nodes[a].name, self._cluster.nodes[b].name
        return self._measured.get((min(first, second), max(first, second)))


class _Wires(Mapping[tuple[int, int], Wire]):
    """Between nodes; made when they are asked for."""

    def __init__(self, layout: _Layout, nodes: Sequence[int]) -> None:
        self._layout, self._nodes = layout, nodes
        self._found: dict[tuple[int, int], Wire | None] = {}

    def __getitem__(self, ends: tuple[int, int]) -> Wire:
        if ends not in self._found:
            self._found[ends] = self._layout.find_wire(*ends)
        wire = self._found[ends]
        if wire is None:
            raise KeyError(ends)
        return wire

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((a, b) for a, b in product(self._nodes, self._nodes) if self.get((a, b)) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)
