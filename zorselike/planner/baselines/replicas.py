"""Tensor parallelism on our costs: a replica of several devices stands as one device.

Our schedules know no tensor parallelism. A baseline that has it is simulated on a cluster whose devices are
replicas inside one node: t times a device's memory and fabric (what t devices exchange with t others goes
side by side), the node's network card as it is. Layers take 1/t of their time, and in each pass (forward,
recomputation, backward) two all-reduces of their output over the real node's fabric (Shoeybi et al. 2019,
Megatron-LM, section 3; with sequence parallelism as many bytes). All memory is divided by t, activations
too. What is left out favours the baseline: smaller products run less efficiently, all-reduces meet no other
traffic, embedding and head exchange nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zorselike.cost.catalogue import find_memory_bytes
from zorselike.cost.network import Network
from zorselike.cost.profile import Profile
from zorselike.cost.sizes import is_layer
from zorselike.cost.step_costs import StepCosts
from zorselike.cost.wires import make_network
from zorselike.plan.cluster.cluster import Cluster, Link, Node, Place
from zorselike.plan.plan import Plan, Recompute
from zorselike.simulator.inputs import SimulationInputs

ALL_REDUCES = 2
"""All-reduces of a layer and pass: behind attention and behind the MLP."""

Members = tuple[Place, ...]
"""The devices of a replica."""


class AllReduces:
    """What all-reduces inside nodes take, each found once for all shapes of replicas."""

    def __init__(self, inputs: SimulationInputs) -> None:
        self._inputs = inputs
        self._networks: dict[tuple[Place, ...], Network] = {}
        self._found: dict[tuple[int, int, int, float], float] = {}

    def seconds(self, replicas: Sequence[Members], num_bytes: float) -> float:
        """One all-reduce in each of a node's replicas, which are alike, at once."""
        key = replicas[0][0].node, len(replicas), len(replicas[0]), num_bytes
        if key not in self._found:
            places = tuple(sorted(place for members in replicas for place in members))
            if places not in self._networks:
                self._networks[places] = make_network(self._inputs.cluster, places, self._inputs.profile)
            network = self._networks[places]
            rings = [[places.index(place) for place in members] for members in replicas]
            flows = [flow for ring in rings for flow in network.collective("all_reduce", ring, num_bytes)]
            self._found[key] = network.time_alone(flows)
        return self._found[key]


@dataclass(frozen=True)
class Replicas:
    """Groups of replicas, and the cluster on which each of them is one device."""

    real: SimulationInputs
    inputs: SimulationInputs
    """On the cluster of replicas."""
    groups: tuple[tuple[Place, ...], ...]
    """Replicas, as places of that cluster."""
    members: Mapping[Place, Members]
    """Real places of each replica."""
    all_reduces: AllReduces

    @cached_property
    def _of_node(self) -> dict[int, list[Members]]:
        found: dict[int, list[Members]] = {}
        for place, members in self.members.items():
            found.setdefault(place.node, []).append(members)
        return found

    def degree(self, place: Place) -> int:
        """Devices of a replica."""
        return len(self.members[place])

    def pass_s(self, place: Place, kind: str, rows: int) -> float:
        """What a layer's all-reduces add to one pass; nothing on a device alone."""
        if self.degree(place) == 1:
            return 0.0
        workload = self.real.workload
        num_bytes = rows * workload.kinds[kind].output_elements_per_row * workload.itemsize
        return ALL_REDUCES * self.all_reduces.seconds(self._of_node[place.node], num_bytes)

    def find_costs(self, plan: Plan) -> StepCosts:
        """What a plan for the cluster of replicas costs.

        Raises:
            ClusterError, ProfileError: As `make_costs`.
        """
        costs = self.inputs.find_costs(plan)
        layers = [_count_layers(plan, self.real, i) for i in range(plan.num_ministages)]

        def time(seconds: float, rank: int, ministage: int, rows: int, num_passes: int) -> float:
            place = costs.places[rank]
            exchange_s = sum(n * self.pass_s(place, kind, rows) for kind, n in layers[ministage].items())
            return seconds / self.degree(place) + num_passes * exchange_s

        backward_passes = [count_backward_passes(plan.group_of(i).recompute) for i in range(len(layers))]
        return replace(
            costs,
            forward_s={key: time(seconds, *key, 1) for key, seconds in costs.forward_s.items()},
            backward_s={
                key: time(seconds, *key, backward_passes[key[1]]) for key, seconds in costs.backward_s.items()
            },
            update_s={key: s / self.degree(costs.places[key[0]]) for key, s in costs.update_s.items()},
            context_bytes=tuple(
                num_bytes * self.degree(place)
                for num_bytes, place in zip(costs.context_bytes, costs.places, strict=True)
            ),
        )


def count_backward_passes(recompute: Recompute) -> int:
    """Passes of a layer's backward: with recomputation also a second forward."""
    return 2 if recompute == "layer" else 1


def _count_layers(plan: Plan, inputs: SimulationInputs, ministage: int) -> Counter[str]:
    """Layers of a ministage by kind."""
    modules = plan.ministages[ministage].modules
    return Counter(inputs.workload.kind_of[name].name for name in modules if is_layer(name))


def make_replicas(
    inputs: SimulationInputs, all_reduces: AllReduces, groups: Sequence[Sequence[Place]], degree: int
) -> Replicas:
    """Groups of devices as groups of replicas.

    Args:
        degree: a power of two. A node's replicas are of the most devices, `degree` or a half, a quarter, ...
            of it, for which each group's part of the node divides into replicas of one type of device.
    """
    cluster = inputs.cluster
    parts = [_by_node(group) for group in groups]
    degrees = {
        node: _find_degree(cluster, [part[node] for part in parts if node in part], degree)
        for node in {place.node for group in groups for place in group}
    }
    found: list[tuple[Place, ...]] = []
    members: dict[Place, Members] = {}
    filled: Counter[int] = Counter()
    for part in parts:
        replicas = []
        for node, places in part.items():
            for start in range(0, len(places), degrees[node]):
                replica = Place(node, filled[node])
                filled[node] += 1
                members[replica] = tuple(places[start : start + degrees[node]])
                replicas.append(replica)
        found.append(tuple(replicas))
    return Replicas(inputs, _fold_inputs(inputs, members, degrees), tuple(found), members, all_reduces)


def _by_node(group: Sequence[Place]) -> dict[int, list[Place]]:
    found: dict[int, list[Place]] = {}
    for place in group:
        found.setdefault(place.node, []).append(place)
    return found


def _find_degree(cluster: Cluster, parts: Sequence[Sequence[Place]], degree: int) -> int:
    alike = all(len({cluster.device_type(place) for place in part}) == 1 for part in parts)
    while degree > 1 and not (alike and all(len(part) % degree == 0 for part in parts)):
        degree //= 2
    return degree


# -- the cluster of replicas ---------------------------------------------------------------


def _fold_inputs(
    inputs: SimulationInputs, members: Mapping[Place, Members], degrees: Mapping[int, int]
) -> SimulationInputs:
    if max(degrees.values()) == 1 and len(members) == inputs.cluster.num_devices:
        in_order = all(own == (place,) for place, own in members.items())
        if in_order:
            return inputs
    nodes = tuple(
        _fold_node(inputs.cluster, n, [own for place, own in members.items() if place.node == n])
        for n in range(len(inputs.cluster.nodes))
    )
    cluster = replace(inputs.cluster, nodes=nodes)
    return replace(inputs, cluster=cluster, profile=_fold_profile(inputs, degrees))


def _fold_node(cluster: Cluster, n: int, replicas: Sequence[Members]) -> Node:
    node = cluster.nodes[n]
    memory = [sum(find_memory_bytes(cluster, place) or 0 for place in own) for own in replicas]
    degree = max(map(len, replicas), default=1)
    return replace(
        node,
        devices=tuple(cluster.device_type(own[0]) for own in replicas),
        memory_bytes=tuple(memory) if all(memory) else (),
        fabric=None if node.fabric is None else _widen(node.fabric, degree, node.fabric_total_bytes_per_s),
    )


def _widen(link: Link, degree: int, total: float | None) -> Link:
    """So many of a link side by side, at most what all together carry."""
    most = float("inf") if total is None else max(total, link.bandwidth_bytes_per_s)
    return Link(
        min(degree * link.bandwidth_bytes_per_s, most),
        link.latency_s,
        tuple((degree * size, min(degree * rate, most)) for size, rate in link.points),
    )


def _fold_profile(inputs: SimulationInputs, degrees: Mapping[int, int]) -> Profile:
    """Without what was measured of devices and does not hold for replicas: how many rows fit, how long
    collectives take; links inside nodes as many times as wide."""
    profile, nodes = inputs.profile, inputs.cluster.nodes
    wide = {nodes[n].name: degree for n, degree in degrees.items() if degree > 1}
    if not wide:
        return profile
    types = {device for node in nodes if node.name in wide for device in node.devices}
    return replace(
        profile,
        layers=tuple(replace(own, max_rows=None) if own.device in types else own for own in profile.layers),
        collectives=(),
        links=tuple(
            replace(own, num_bytes=tuple(wide[own.between[0]] * size for size in own.num_bytes))
            if own.between[0] == own.between[1] and own.between[0] in wide
            else own
            for own in profile.links
        ),
    )
