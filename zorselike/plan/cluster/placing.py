"""Where the ranks of a plan are in a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zorselike.errors import ClusterError
from zorselike.plan.cluster.parts import Place
from zorselike.plan.plan import Device, Plan
from zorselike.text.wording import count, suggest

if TYPE_CHECKING:
    from zorselike.plan.cluster.cluster import Cluster


def place_ranks(cluster: Cluster, plan: Plan) -> tuple[Place, ...]:
    """The place of each rank: by the plan's `[[devices]]`, else in the order of `cluster.places`.

    A node of the plan is one of the cluster by its name or by the short form of either (up to the
    first dot), as `match_devices` takes hostnames. Types are compared without regard to case, where
    the plan names one.

    Raises:
        ClusterError: A node or device that the plan names is not here, or has another type; two ranks
            would be in one place; or the plan has more ranks than the cluster devices.
    """
    if not plan.devices:
        if plan.num_ranks > cluster.num_devices:
            raise ClusterError(
                f"the plan is for {count(plan.num_ranks, 'rank')}, the cluster has "
                f"{count(cluster.num_devices, 'device')}; plan for fewer, or add nodes"
            )
        return cluster.places[: plan.num_ranks]
    places = [_find_place(cluster, device) for device in sorted(plan.devices, key=lambda d: d.rank)]
    for rank, place in enumerate(places):
        if place in places[:rank]:
            raise ClusterError(
                f"plan ranks {places.index(place)} and {rank} are both local rank {place.local_rank} of "
                f"node {cluster.nodes[place.node].name}; give each a device of its own in [[devices]]"
            )
    return tuple(places)


def _find_place(cluster: Cluster, device: Device) -> Place:
    where = f"plan rank {device.rank}"
    index = _find_node(cluster, device.node, where)
    node = cluster.nodes[index]
    if not 0 <= device.local_rank < len(node.devices):
        raise ClusterError(
            f"{where} is local rank {device.local_rank} of node {node.name}, which has "
            f"{count(len(node.devices), 'device')} in the cluster; mend the plan's [[devices]] or the cluster"
        )
    found = node.devices[device.local_rank]
    if device.type and device.type.casefold() != found.casefold():
        raise ClusterError(
            f"{where} is {device.type!r} in the plan; local rank {device.local_rank} of node {node.name} is "
            f"{found!r} in the cluster; mend one of them"
        )
    return Place(index, device.local_rank)


def _find_node(cluster: Cluster, name: str, where: str) -> int:
    names = [node.name for node in cluster.nodes]
    if name in names:
        return names.index(name)
    short = [i for i, known in enumerate(names) if _is_short_of(name, known) or _is_short_of(known, name)]
    if len(short) == 1:
        return short[0]
    if short:
        raise ClusterError(
            f"{where} is on node {name}, which may be any of {', '.join(names[i] for i in short)} of the "
            "cluster; write the full name in [[devices]]"
        )
    raise ClusterError(
        f"{where} is on node {name}, which the cluster does not have"
        f"{suggest(name, names) or '; its nodes are ' + ', '.join(names)}"
    )


def _is_short_of(short: str, full: str) -> bool:
    return "." not in short and full.partition(".")[0] == short
