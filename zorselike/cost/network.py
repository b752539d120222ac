"""Who shares which wires: capacities, and the flows that transfers and collectives put on them.

Flows that pass the same capacity at the same time share it; who gets how much is the simulator's affair.
Measurements of a profile go before what the cluster file says: a link's measured times give its rate and
latency, and a collective measured for the same devices over as many nodes takes, if it is alone, the
seconds that were measured, unless a capacity on its way carries less.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from zorselike.cost.curves import Curve
from zorselike.cost.profile import Collective
from zorselike.errors import ClusterError
from zorselike.plan.cluster.cluster import Cluster, Link, Place

CollectiveOp = Collective

Key = tuple[str, tuple[str, ...], int]
"""A collective, the types of its devices sorted, and over how many nodes they are."""


@dataclass(frozen=True)
class Flow:
    """Bytes on their way through some capacities, all at once, as water through pipes."""

    num_bytes: float
    capacities: tuple[int, ...]
    """Indices into `Network.capacities`, which others may use at the same time; what stands in it several
    times carries the bytes several times."""
    max_rate: float
    """Bytes per second that it reaches if it is alone; may be infinite."""
    latency_s: float = 0.0
    """Before its first byte moves."""
    egress: tuple[int, int] | None = None
    """Nodes from and to, where it leaves a node: for money and for bytes per link."""
    times: int = 1
    """Flows that it stands for, all alike."""


@dataclass(frozen=True)
class Wire:
    """The way between two nodes, in one direction."""

    link: Link
    capacities: tuple[int, ...]


@dataclass(frozen=True)
class HostWire:
    """The way between a device and its host's memory."""

    to_device: Link
    to_host: Link
    load: tuple[int, ...]
    """Capacities on the way to the device."""
    store: tuple[int, ...]
    """Capacities on the way to the host."""


@dataclass(frozen=True)
class Port:
    """Where one device is joined to others of its node, and to its host."""

    send: int | None
    receive: int | None
    """Capacities of the fabric; the same where all devices share one; None for a device alone."""
    host: HostWire | None


@dataclass(frozen=True)
class Network:
    """Capacities that traffic shares, named for reports, and the flows that things cause on them.

    Ranks are those of a plan, by `places`. `zorselike/cost/wires.py` makes it.
    """

    capacities: Sequence[float]
    """Bytes per second; of many nodes more may come with each wire that is first asked for."""
    names: Sequence[str]
    """`node a, out`, `regions eu - us`."""
    cluster: Cluster
    places: tuple[Place, ...]
    """Of each rank."""
    ports: tuple[Port, ...]
    """Of each rank."""
    wires: Mapping[tuple[int, int], Wire]
    """By nodes from and to; the same node twice: its fabric, without the devices' ports."""
    collectives: Mapping[Key, Curve] = field(default_factory=dict)
    """Measured seconds against bytes of the whole buffer."""
    _found: dict[object, tuple[Flow, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By what was asked for: a step asks for the same again and again."""

    def transfer(self, source: int, target: int, num_bytes: float) -> Flow:
        """One rank sends to another; raises `ClusterError` where nothing says how they are connected."""
        key = (source, target, num_bytes)
        if key not in self._found:
            wire, capacities = self._way(source, target)
            rate, latency_s = wire.link.rate(max(num_bytes, 1.0)), wire.link.latency_s
            egress = self._egress(source, target)
            self._found[key] = (Flow(num_bytes, capacities, rate, latency_s, egress),)
        return self._found[key][0]

    def copy(self, rank: int, num_bytes: float, *, to_device: bool) -> Flow:
        """Between a device and its host's memory; raises `ClusterError` where nothing says how fast."""
        host = self.ports[rank].host
        if host is None:
            place = self.places[rank]
            node, device = self.cluster.nodes[place.node].name, self.cluster.device_type(place)
            raise ClusterError(
                f"cluster: nothing says how fast {device} of node {node} copies to and from its host, which "
                "the plan offloads to; give the node a host_link"
            )
        link = host.to_device if to_device else host.to_host
        capacities = host.load if to_device else host.store
        return Flow(num_bytes, capacities, link.rate(max(num_bytes, 1.0)), link.latency_s)

    def collective(self, op: CollectiveOp, ranks: Sequence[int], num_bytes: float) -> tuple[Flow, ...]:
        """A ring over the ranks, `num_bytes` the whole (gathered) buffer: one flow per node boundary that
        the ring crosses and one per node inside it; all start together, and the last to end ends it.

        Over each edge of a ring of n go (n-1)/n of the buffer in n - 1 steps for an all-gather or a
        reduce-scatter, and twice that for an all-reduce. Steps follow each other on an edge without a break,
        so that of latencies there are those of the edges that a byte passes on its way around: all but
        one. A rank alone: no flows.
        """
        if len(ranks) < 2:
            return ()
        key = (op, tuple(ranks), num_bytes)
        if key not in self._found:
            flows = self._ring_flows(op, ranks, num_bytes)
            self._found[key] = self._measured_ring(op, flows, ranks, num_bytes)
        return self._found[key]

    def time_alone(self, flows: Iterable[Flow]) -> float:
        """Seconds of flows that start together and share capacities with no others."""
        load: defaultdict[int, float] = defaultdict(float)
        latency = slowest = 0.0
        for flow in flows:
            latency = max(latency, flow.latency_s)
            slowest = max(slowest, flow.num_bytes / flow.max_rate)
            for index in flow.capacities:
                load[index] += flow.num_bytes
        narrowest = max((num_bytes / self.capacities[i] for i, num_bytes in load.items()), default=0.0)
        return latency + max(slowest, narrowest)

    # -- rings -----------------------------------------------------------------------------

    def _ring_flows(self, op: CollectiveOp, ranks: Sequence[int], num_bytes: float) -> tuple[Flow, ...]:
        ring = sorted(ranks, key=lambda rank: self.places[rank])
        edges: dict[tuple[int, int], list[tuple[int, int]]] = {}
        latencies = []
        for source, target in pairwise([*ring, ring[0]]):
            edges.setdefault(self._nodes(source, target), []).append((source, target))
            latencies.append(self._way(source, target)[0].link.latency_s)
        num_rounds = 2 if op == "all_reduce" else 1
        num_steps = num_rounds * (len(ring) - 1)
        latency_s = num_rounds * (sum(latencies) - min(latencies))
        return tuple(
            self._edge_flow(own, num_bytes / len(ring), num_steps, latency_s) for own in edges.values()
        )

    def _edge_flow(
        self, edges: Sequence[tuple[int, int]], chunk_bytes: float, num_steps: int, latency_s: float
    ) -> Flow:
        """One chunk a step over all edges inside a node, or over the one between two. Edges that share one
        capacity are a flow of the bytes of all of them."""
        ways = [self._way(*edge) for edge in edges]
        link = ways[0][0].link
        egress, port = self._egress(*edges[0]), self.ports[edges[0][0]]
        times = len(edges) if egress is None and port.send == port.receive else 1
        return Flow(
            times * num_steps * chunk_bytes,
            tuple(dict.fromkeys(index for _, capacities in ways for index in capacities)),
            times * link.rate(max(chunk_bytes, 1.0)),
            latency_s,
            egress,
        )

    def _measured_ring(
        self, op: CollectiveOp, flows: tuple[Flow, ...], ranks: Sequence[int], num_bytes: float
    ) -> tuple[Flow, ...]:
        """The flows at the rate and latency that were measured, if they were."""
        devices = tuple(sorted(self.cluster.device_type(self.places[rank]) for rank in ranks))
        curve = self.collectives.get((op, devices, len({self.places[rank].node for rank in ranks})))
        if curve is None:
            return flows
        seconds = curve(num_bytes)
        latency = min(curve.start_s, seconds)
        moving = seconds - latency
        return tuple(
            replace(flow, max_rate=flow.num_bytes / moving if moving > 0 else math.inf, latency_s=latency)
            for flow in flows
        )

    # -- ways ------------------------------------------------------------------------------

    def _way(self, source: int, target: int) -> tuple[Wire, tuple[int, ...]]:
        """The wire between two ranks, and all capacities on the way."""
        wire = self.wires.get(self._nodes(source, target))
        if wire is None:
            self.cluster.link(self.places[source], self.places[target])
            raise AssertionError("the cluster knows a link that the network lacks")
        if self._egress(source, target) is not None:
            return wire, wire.capacities
        ports = (self.ports[source].send, self.ports[target].receive)
        return wire, tuple(dict.fromkeys(index for index in ports if index is not None))

    def _nodes(self, source: int, target: int) -> tuple[int, int]:
        return self.places[source].node, self.places[target].node

    def _egress(self, source: int, target: int) -> tuple[int, int] | None:
        nodes = self._nodes(source, target)
        return None if nodes[0] == nodes[1] else nodes
