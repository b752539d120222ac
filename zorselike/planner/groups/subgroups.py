"""Groups cut into even sub-groups, as the Zorse paper does where memory is short (16 V100 as twice 8), and a
few groups joined into fewer, in every way: cards of like speed together, whatever their types."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from zorselike.plan.shares import cut_in_proportion
from zorselike.planner.groups.bandwidths import Bandwidths, Group, Partition, sort_groups

MAX_UNEVEN = 8
"""Into how many sub-groups of whole nodes a group is cut where its nodes do not divide evenly."""

GroupKind = tuple[tuple[tuple[str, int], ...], tuple[int, ...]]
"""Devices by type, and on each node, without the nodes' names."""


def split_group(bandwidths: Bandwidths, group: Group, num_parts: int) -> Partition:
    """A group of at least `num_parts` devices as so many sub-groups of about equal size.

    Sub-groups consist of whole nodes if there are enough, neighbours in zones; else nodes are cut too,
    where their device types change if that is where an edge falls.
    """
    nodes = _devices_by_node(bandwidths, group)
    pieces: Sequence[Sequence[int]] = nodes
    if num_parts > len(nodes):
        pieces = [[device] for devices in nodes for device in devices]
    ends = cut_in_proportion([len(piece) for piece in pieces], [1.0] * num_parts)
    return sort_groups(
        [device for piece in pieces[start:end] for device in piece]
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    )


def list_splits(bandwidths: Bandwidths, group: Group) -> list[int]:
    """Into how many sub-groups a group can sensibly be cut, rising: any few of whole nodes, as many as
    divide its nodes, and as many as also divide the devices of each node."""
    sizes = [len(devices) for devices in _devices_by_node(bandwidths, group)]
    of_nodes = {*range(1, min(len(sizes), MAX_UNEVEN) + 1), *_divisors(len(sizes))}
    of_devices = {len(sizes) * num for num in _divisors(math.gcd(*sizes))}
    return sorted((of_nodes | of_devices) - {1})


def refine(
    bandwidths: Bandwidths, name: str, partition: Partition, max_groups: int
) -> Iterator[tuple[str, Partition]]:
    """A partition with the groups of one kind cut into sub-groups, for every kind and number of them, and
    with all groups cut to at most so many devices; each with its name."""
    kinds: dict[GroupKind, list[Group]] = {}
    for group in partition:
        kinds.setdefault(_kind(bandwidths, group), []).append(group)
    splits = {kind: list_splits(bandwidths, groups[0]) for kind, groups in kinds.items()}
    for kind, groups in kinds.items():
        for num in splits[kind]:
            if len(partition) + (num - 1) * len(groups) > max_groups:
                break
            which = ", each" if len(groups) > 1 else ""
            which = f", {show_devices(bandwidths, groups[0])}" if len(kinds) > 1 else which
            yield f"{name}{which} as {num}", _split_kinds(bandwidths, kinds, {kind: num})
    if len(kinds) > 1:
        for most in _sizes(kinds, splits):
            chosen = {
                kind: next((num for num in (1, *splits[kind]) if _largest(groups, num) <= most), None)
                for kind, groups in kinds.items()
            }
            whole = {kind: num for kind, num in chosen.items() if num is not None}
            num_groups = sum(num * len(kinds[kind]) for kind, num in whole.items())
            if len(whole) == len(kinds) and num_groups <= max_groups:
                yield f"{name}, at most {most} each", _split_kinds(bandwidths, kinds, whole)


def show_devices(bandwidths: Bandwidths, group: Group) -> str:
    """`8 A100-40 + 16 T4`."""
    return " + ".join(f"{num} {type}" for type, num in _count_types(bandwidths, group).items())


def _split_kinds(
    bandwidths: Bandwidths, kinds: dict[GroupKind, list[Group]], splits: dict[GroupKind, int]
) -> Partition:
    return sort_groups(
        part
        for kind, groups in kinds.items()
        for group in groups
        for part in split_group(bandwidths, group, splits.get(kind, 1))
    )


def _sizes(kinds: dict[GroupKind, list[Group]], splits: dict[GroupKind, list[int]]) -> list[int]:
    """What the largest sub-group of a kind may have, falling."""
    return sorted({_largest(groups, num) for kind, groups in kinds.items() for num in splits[kind]})[::-1]


def _largest(groups: Sequence[Group], num_parts: int) -> int:
    return math.ceil(len(groups[0]) / num_parts)


def _kind(bandwidths: Bandwidths, group: Group) -> GroupKind:
    sizes = sorted(len(devices) for devices in _devices_by_node(bandwidths, group))
    return tuple(sorted(_count_types(bandwidths, group).items())), tuple(sizes)


def _count_types(bandwidths: Bandwidths, group: Group) -> Counter[str]:
    return Counter(bandwidths.blocks[bandwidths.block_of[device]].type for device in group)


def _devices_by_node(bandwidths: Bandwidths, group: Group) -> list[list[int]]:
    """Nodes of one zone beside each other, devices of one block too."""
    nodes = bandwidths.cluster.nodes
    found: dict[tuple[str, str, int], list[int]] = {}
    for device in sorted(group, key=lambda d: (bandwidths.block_of[d], d)):
        index = bandwidths.blocks[bandwidths.block_of[device]].node
        found.setdefault((nodes[index].region, nodes[index].zone, index), []).append(device)
    return [found[key] for key in sorted(found)]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# -- joined -------------------------------------------------------------------------------


def join_groups(bandwidths: Bandwidths, name: str, partition: Partition) -> Iterator[tuple[str, Partition]]:
    """Every partition between this one and one group, neither of them included; each with its name."""
    for joined in arrange_in_sets(partition):
        if 1 < len(joined) < len(partition):
            together = [sort_groups([chain(*groups)])[0] for groups in joined if len(groups) > 1]
            shown = " and ".join(f"{show_devices(bandwidths, group)} together" for group in together)
            yield f"{name}, {shown}", sort_groups(chain(*groups) for groups in joined)


def arrange_in_sets(partition: Partition) -> Iterator[list[Partition]]:
    """Every way to put groups into sets: the last joins each set of each way for the others, or is alone."""
    if not partition:
        yield []
        return
    last = partition[-1]
    for sets in arrange_in_sets(partition[:-1]):
        for i, groups in enumerate(sets):
            yield [*sets[:i], (*groups, last), *sets[i + 1 :]]
        yield [*sets, (last,)]
