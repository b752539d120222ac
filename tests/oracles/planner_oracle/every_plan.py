"""All plans of a small problem: every grouping of every subset of its devices, every cut of the layers, every
division of the rows; of plans that differ only by which of two equal devices does what, one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from typing import NamedTuple

from zorselike.errors import ClusterError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Device, GradReduce, Group, Ministage, Plan, Recompute
from zorselike.plan.shares import expand_shares
from zorselike.planner.problem import PlanProblem


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the groups of a plan have in common."""

    zero: int
    grad_reduce: GradReduce
    recompute: Recompute
    offload: tuple[str, ...]
    rows_per_microbatch: int
    overlap_grad_reduce: bool = True


@dataclass(frozen=True)
class Shape:
    """Who computes what, all but the options."""

    groups: tuple[tuple[int, ...], ...]
    """Indices into `Cluster.places`, in pipeline order."""
    rows: tuple[tuple[int, ...], ...]
    """Rows of each device of each group; 0: holds shards only."""
    sizes: tuple[int, ...]
    """Layers of each ministage; ministage `i` is of group `i` modulo the number of groups."""


class _Role(NamedTuple):
    """What a device does: nothing with group -1."""

    group: int
    rows: int


def list_shapes(problem: PlanProblem) -> Iterator[Shape]:
    """All of them, within the problem's devices, regions and what is fixed; each group has a ministage."""
    num_layers = len(problem.workload.layers)
    cuts: dict[int, list[tuple[int, ...]]] = {}
    for groups, rows in list_divisions(problem):
        if len(groups) not in cuts:
            numbers = range(len(groups), num_layers + 1)
            if problem.fixed.ministages is not None:
                numbers = range(problem.fixed.ministages, problem.fixed.ministages + 1)
            cuts[len(groups)] = [
                sizes for number in numbers if number >= len(groups) for sizes in cut(num_layers, number)
            ]
        yield from (Shape(groups, rows, sizes) for sizes in cuts[len(groups)])


Division = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]


def list_divisions(problem: PlanProblem) -> Iterator[Division]:
    """Groups in order and rows of their devices, those without a mirror image among the earlier ones."""
    cluster = problem.cluster
    mirrors = find_mirrors(cluster)
    for groups in _list_groupings(problem):
        shares = [list(divide(problem.global_batch, len(group))) for group in groups]
        for rows in product(*shares):
            roles = [_Role(-1, 0)] * cluster.num_devices
            for g, (group, own) in enumerate(zip(groups, rows, strict=True)):
                for device, number in zip(group, own, strict=True):
                    roles[device] = _Role(g, number)
            if problem.fixed.groups is not None or _is_first(roles, mirrors):
                yield groups, rows


def _is_first(roles: Sequence[_Role], mirrors: Sequence[tuple[int, ...]]) -> bool:
    own = tuple(roles)
    return all(own <= tuple(roles[device] for device in mirror) for mirror in mirrors)


def _list_groupings(problem: PlanProblem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Groups that may exist, each of devices that something joins, in every order."""
    if problem.fixed.groups is not None:
        yield problem.fixed.groups
        return
    most = min(len(problem.usable), problem.max_devices or len(problem.usable))
    for number in range(1, most + 1):
        for devices in combinations(problem.usable, number):
            for parts in _partition(devices):
                if len(parts) > len(problem.workload.layers):
                    continue
                if all(_may_be_group(problem, part) for part in parts):
                    yield from permutations(parts)


def _partition(devices: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All partitions into sets."""
    if not devices:
        yield ()
        return
    first, rest = devices[0], devices[1:]
    for number in range(len(rest) + 1):
        for others in combinations(rest, number):
            left = tuple(device for device in rest if device not in others)
            for parts in _partition(left):
                yield ((first, *others), *parts)


def _may_be_group(problem: PlanProblem, devices: Sequence[int]) -> bool:
    cluster = problem.cluster
    regions = {cluster.nodes[cluster.places[device].node].region for device in devices}
    return problem.spans_regions or len(regions) == 1


def divide(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to give out `total` rows to so many devices, 0 to some allowed."""
    for bars in combinations(range(total + parts - 1), parts - 1):
        yield tuple(b - a - 1 for a, b in pairwise((-1, *bars, total + parts - 1)))


def cut(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut `total` layers into so many parts, none empty."""
    for ends in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *ends, total)))


def find_mirrors(cluster: Cluster) -> list[tuple[int, ...]]:
    """Renumberings of the devices after which the cluster is the same, the one that changes nothing among
    them. Tries all, so only for few devices."""
    devices = range(cluster.num_devices)
    kinds = [_describe_device(cluster, device) for device in devices]
    joined = {(a, b): _describe_pair(cluster, a, b) for a in devices for b in devices if a != b}
    return [
        order
        for order in permutations(devices)
        if all(kinds[order[a]] == kinds[a] for a in devices)
        and all(joined[order[a], order[b]] == found for (a, b), found in joined.items())
    ]


def _describe_device(cluster: Cluster, device: int) -> object:
    place = cluster.places[device]
    node = cluster.nodes[place.node]
    return (
        cluster.device_type(place),
        node.memory_bytes[place.local_rank] if node.memory_bytes else None,
        (node.zone, node.region, node.price_per_hour, node.host_memory_bytes, node.host_link),
        (node.host_link_both_bytes_per_s, node.fabric, node.fabric_total_bytes_per_s, node.nic),
        len(node.devices),
    )


def _describe_pair(cluster: Cluster, a: int, b: int) -> object:
    first, second = cluster.places[a], cluster.places[b]
    if first.node == second.node:
        return "one node"
    try:
        return cluster.link(first, second)
    except ClusterError:
        return None


def make_plan(problem: PlanProblem, shape: Shape, options: Options) -> Plan:
    """The plan of a shape; ranks go through the groups in order."""
    cluster, workload = problem.cluster, problem.workload
    order = [device for group in shape.groups for device in group]
    rank_of = {device: rank for rank, device in enumerate(order)}
    groups = tuple(
        Group(
            ranks=tuple(rank_of[device] for device in devices),
            microbatches=expand_shares(
                [
                    (rank_of[device], rows, options.rows_per_microbatch)
                    for device, rows in zip(devices, own, strict=True)
                ],
                problem.global_batch,
            ),
            zero=options.zero,
            grad_reduce=options.grad_reduce,
            overlap_grad_reduce=options.overlap_grad_reduce,
            offload=options.offload,
            recompute=options.recompute,
        )
        for devices, own in zip(shape.groups, shape.rows, strict=True)
    )
    modules = iter(name for name, _ in workload.layers)
    return Plan(
        global_batch=problem.global_batch,
        groups=groups,
        ministages=tuple(
            Ministage(i % len(groups), tuple(next(modules) for _ in range(size)))
            for i, size in enumerate(shape.sizes)
        ),
        devices=tuple(
            Device(rank, cluster.nodes[place.node].name, place.local_rank, cluster.device_type(place))
            for rank, place in enumerate(cluster.places[device] for device in order)
        ),
        sequence_length=workload.sequence_length,
        model=workload.model,
    )
