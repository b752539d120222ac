"""Candidate groups of devices: data parallelism inside a group, the pipeline across groups (Zorse 4.3.2)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import chain

from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Node
from zorselike.planner.groups.bandwidths import Bandwidths, Partition, sort_groups
from zorselike.planner.groups.merge import merge_by_bandwidth
from zorselike.planner.groups.split_by_cuts import split_by_cuts
from zorselike.planner.groups.subgroups import arrange_in_sets, join_groups, refine
from zorselike.text.wording import count

FEW_DEVICES = 5
"""Up to how many devices every partition is a candidate."""
FEW_GROUPS = 4
"""Up to how many groups that a person would make they are joined in every way."""
MOST_BLOCKS = 512
"""With more blocks cuts and merging begin with all nodes that are alike together: both take the cube of their
number."""
LEAST_MAX_GROUPS = 8
"""So many groups are looked at where there are fewer nodes, but as many devices."""


_COMMON: dict[str, Callable[[Node, str], Hashable]] = {
    "one group": lambda node, type: (),
    "by region": lambda node, type: node.region,
    "by zone": lambda node, type: (node.region, node.zone),
    "by device type": lambda node, type: type,
    "by region and device type": lambda node, type: (node.region, type),
    "by zone and device type": lambda node, type: (node.region, node.zone, type),
    "by kind of node": lambda node, type: _kind(node),
    "by region and kind of node": lambda node, type: (node.region, _kind(node)),
    "by zone and kind of node": lambda node, type: (node.region, node.zone, _kind(node)),
    "by node": lambda node, type: node.name,
    "by node and device type": lambda node, type: (node.name, type),
}
"""What the devices of a group have in common, from the coarse to the fine."""


@dataclass(frozen=True)
class Grouping:
    """A candidate."""

    groups: Partition
    """Indices into `Cluster.places`."""
    names: tuple[str, ...]
    """All ways to come to it: `by device type`, `minimum 3-cut`."""

    @property
    def name(self) -> str:
        """The one that says most to a person."""
        return self.names[0]


def find_groupings(bandwidths: Bandwidths, *, max_groups: int | None = None) -> tuple[Grouping, ...]:
    """Candidates by rising number of groups, each partition once, up to interchangeable devices and nodes.

    Each has every device of `bandwidths` in one group, and every two devices of a group are joined and may
    be in one group. `max_groups` is the number of nodes if it is not given, or up to 8 devices if that is
    more; a plan never has use for more groups than the model has layers.

    Raises:
        ConfigError: No partition into so few groups exists.
    """
    if max_groups is None:
        max_groups = count_useful_groups(bandwidths)
    names: dict[object, dict[str, None]] = {}
    partitions: dict[object, Partition] = {}
    for name, partition in _propose(bandwidths, max_groups):
        if len(partition) > max_groups or any(bandwidths.slowest_link(own) <= 0 for own in partition):
            continue
        key = _key(bandwidths, partition)
        partitions.setdefault(key, partition)
        names.setdefault(key, {})[name] = None
    if not partitions:
        raise ConfigError(_explain_none(bandwidths, max_groups))
    found = [Grouping(partition, tuple(names[key])) for key, partition in partitions.items()]
    return tuple(sorted(found, key=lambda grouping: len(grouping.groups)))


def count_useful_groups(bandwidths: Bandwidths) -> int:
    """How many groups are looked at: as many as there are nodes, or a few where there are as many devices."""
    num_nodes = len({block.node for block in bandwidths.blocks})
    return max(num_nodes, min(len(bandwidths.devices), LEAST_MAX_GROUPS))


def _propose(bandwidths: Bandwidths, max_groups: int) -> Iterator[tuple[str, Partition]]:
    """Names and partitions, those first whose names say most; the same partition may come again."""
    natural = _group_naturally(bandwidths)
    yield from natural.items()
    coarse = bandwidths.join_alike() if len(bandwidths.blocks) > MOST_BLOCKS else bandwidths
    for partition in split_by_cuts(coarse, max_groups):
        yield (f"minimum {len(partition)}-cut" if len(partition) > 1 else "one group", partition)
    merged = list(merge_by_bandwidth(coarse, max_groups))
    for partition in reversed(merged):
        yield (f"merged by bandwidth into {len(partition)}" if len(partition) > 1 else "one group", partition)
    for name, partition in natural.items():
        yield from refine(bandwidths, name, partition, max_groups)
        if len(partition) <= FEW_GROUPS:
            yield from join_groups(bandwidths, name, partition)
    if len(bandwidths.devices) <= FEW_DEVICES:
        for sets in arrange_in_sets(tuple((device,) for device in bandwidths.devices)):
            partition = sort_groups(chain(*devices) for devices in sets)
            yield f"one of all ways to make {count(len(partition), 'group')}", partition


def _group_naturally(bandwidths: Bandwidths) -> dict[str, Partition]:
    """The groups that a person would make, by what devices have in common, each under the first name that
    yields it, without those that have devices in one group that may not be."""
    found: dict[Partition, str] = {}
    for name, common in _COMMON.items():
        groups: dict[Hashable, list[int]] = {}
        for block in bandwidths.blocks:
            key = common(bandwidths.cluster.nodes[block.node], block.type)
            groups.setdefault(key, []).extend(block.devices)
        partition = sort_groups(groups.values())
        if partition not in found and all(bandwidths.slowest_link(group) > 0 for group in partition):
            found[partition] = name
    return {name: partition for partition, name in found.items()}


def _kind(node: Node) -> Hashable:
    """Nodes with the same hardware: the paper's groups of cluster B (Zorse 6.2)."""
    return node.devices, node.memory_bytes, node.fabric, node.fabric_total_bytes_per_s, node.nic


def _key(bandwidths: Bandwidths, partition: Partition) -> object:
    """Equal for partitions that differ only in which devices of a block are where; of alike nodes too, but
    for so many that it takes long."""
    if len(bandwidths.blocks) <= MOST_BLOCKS:
        return bandwidths.describe(partition)
    return tuple(sorted(bandwidths.count_blocks(group) for group in partition))


def _explain_none(bandwidths: Bandwidths, max_groups: int) -> str:
    nodes = [bandwidths.cluster.nodes[block.node] for block in bandwidths.blocks]
    regions = {node.region for node in nodes}
    reason = (
        f"the devices are in {count(len(regions), 'region')}, which groups may not span; "
        "allow it, leave regions out, or"
        if len(regions) > max_groups
        else "the devices are not all joined;"
    )
    return f"plan: no partition into at most {count(max_groups, 'group')} exists: {reason} allow more groups"
