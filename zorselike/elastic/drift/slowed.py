"""The planner's problem for cards that have become slower: each counts as a type of device of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from zorselike.cost.catalogue import find_device, find_memory_bytes
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, Profile, Source, UpdateTime
from zorselike.cost.wires import REACHED_OF_BUS
from zorselike.errors import ClusterError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.cluster.device_types import at_speed, split_speed
from zorselike.plan.cluster.parts import Link, Node
from zorselike.plan.plan import RECOMPUTE, Plan
from zorselike.planner.problem import PlanProblem

_ROWS = (1, 2, 4, 8, 16, 32, 64)


def slow_down(problem: PlanProblem, factors: Mapping[int, float]) -> PlanProblem:
    """The same question with some devices slower.

    Args:
        factors: by index into `Cluster.places`: how many times longer that device computes.
    """
    if not factors:
        return problem
    cluster = problem.cluster
    named = {i: at_speed(cluster.device_type(cluster.places[i]), 1 / factor) for i, factor in factors.items()}
    types = {named[i]: (cluster.device_type(cluster.places[i]), factor) for i, factor in factors.items()}
    nodes = tuple(_rename(cluster, number, node, named) for number, node in enumerate(cluster.nodes))
    return replace(
        problem,
        cluster=replace(cluster, nodes=nodes),
        profile=_slow_profile(problem, types),
    )


def with_own_types(plan: Plan) -> Plan:
    """A plan for such a problem, as one for the devices as they are called."""
    devices = tuple(replace(device, type=split_speed(device.type)[0]) for device in plan.devices)
    return replace(plan, devices=devices, cluster_fingerprint=None)


def _rename(cluster: Cluster, number: int, node: Node, named: Mapping[int, str]) -> Node:
    own = [i for i, place in enumerate(cluster.places) if place.node == number]
    if not any(i in named for i in own):
        return node
    sizes = [find_memory_bytes(cluster, cluster.places[i]) for i in own]
    known = tuple(size for size in sizes if size is not None)
    return replace(
        node,
        devices=tuple(named.get(i, cluster.device_type(cluster.places[i])) for i in own),
        memory_bytes=known if len(known) == len(sizes) else (),
        host_link=node.host_link or _find_host_link(node),
    )


def _find_host_link(node: Node) -> Link | None:
    """The catalogue's bus, which is looked up by the types of devices; what was measured goes before it."""
    try:
        rates = [find_device(device).host_link_bytes_per_s for device in node.devices]
    except ClusterError:
        return None
    return Link(REACHED_OF_BUS * min(rates))


def _slow_profile(problem: PlanProblem, types: Mapping[str, tuple[str, float]]) -> Profile:
    """`types`: by name, which device it is and how much slower."""
    profile, model = problem.profile, LayerTimeModel(problem.profile, problem.workload)
    layers = [
        times
        for name, (device, factor) in types.items()
        for times in _slow(problem, model, name, device, factor)
    ]
    source = Source("given", note="measured while training")
    updates = tuple(
        UpdateTime(
            device=name,
            dtype=problem.workload.dtype,
            seconds_per_parameter=model.update_s(device, 10**6) / 10**6 * factor,
            source=source,
        )
        for name, (device, factor) in types.items()
    )
    links = tuple(
        replace(rates, device=name)
        for name, (device, _) in types.items()
        for rates in profile.host_links
        if rates.device == device
    )
    batches = tuple(
        replace(batch, device=name)
        for name, (device, _) in types.items()
        for batch in profile.largest_batches
        if batch.device == device
    )
    return replace(
        profile,
        layers=(*profile.layers, *layers),
        updates=(*profile.updates, *updates),
        host_links=(*profile.host_links, *links),
        largest_batches=(*profile.largest_batches, *batches),
    )


def _slow(
    problem: PlanProblem, model: LayerTimeModel, name: str, device: str, factor: float
) -> Iterator[LayerTimes]:
    workload = problem.workload
    for kind in workload.kinds:
        for recompute in RECOMPUTE:
            most = model.max_rows(kind, device, recompute)
            rows = tuple(number for number in _ROWS if most is None or number <= most) or (1,)
            yield LayerTimes(
                kind=kind,
                device=name,
                dtype=workload.dtype,
                sequence_length=workload.sequence_length,
                recompute=recompute,
                rows=rows,
                forward_s=tuple(factor * model.forward_s(kind, device, number, recompute) for number in rows),
                backward_s=tuple(
                    factor * model.backward_s(kind, device, number, recompute) for number in rows
                ),
                max_rows=most,
                memory_bytes_per_row=model.kept_bytes.get((kind, device, recompute)),
                source=Source("given", note="measured while training"),
            )
