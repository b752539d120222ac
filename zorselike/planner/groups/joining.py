"""A few groups joined into fewer, in every way: cards of like speed together, whatever their types."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from zorselike.planner.groups.bandwidths import Bandwidths, Partition, sort_groups
from zorselike.planner.groups.subgroups import show_devices


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
