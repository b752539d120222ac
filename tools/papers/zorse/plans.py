"""Plans as Zorse's paper has them: layers by the speed of groups, rows by the speed of cards (4.3.3)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zorselike.plan.plan import Group, Ministage, Plan, Recompute
from zorselike.plan.shares import expand_shares
from zorselike.plan.workload import Workload


@dataclass(frozen=True)
class Options:
    """What is chosen for a whole plan."""

    ministages: int
    """Ministages of each group; a group with fewer layers has as many as layers."""
    rows_per_microbatch: int
    zero: int = 2
    offload: tuple[str, ...] = ("params", "activations")
    recompute: Recompute = "layer"
    order: Literal["zorse", "1f1b"] = "zorse"


def share_out(
    total: int, speeds: Sequence[float], *, taken: Sequence[float] = (), caps: Mapping[int, int] | None = None
) -> list[int] | None:
    """Whole numbers that add up to `total`, in proportion to the speeds: each next one goes to who would be
    done with it first, so that the last to be done is done as early as can be.

    Args:
        taken: what each has already, in the same unit.
        caps: the most that some may get, by position.

    Returns:
        None if the caps leave no room.
    """
    limits = caps or {}
    given = [0] * len(speeds)
    before = taken or [0.0] * len(speeds)
    heap = [((before[i] + 1) / speed, i) for i, speed in enumerate(speeds) if limits.get(i, total) > 0]
    heapq.heapify(heap)
    for _ in range(total):
        if not heap:
            return None
        _, i = heapq.heappop(heap)
        given[i] += 1
        if given[i] < limits.get(i, total):
            heapq.heappush(heap, ((before[i] + given[i] + 1) / speeds[i], i))
    return given


def cut_evenly(total: int, pieces: int) -> list[int]:
    """Sizes of at most so many pieces that differ by one at most, the larger first; none is empty."""
    pieces = min(pieces, total)
    return [total // pieces + (i < total % pieces) for i in range(pieces)] if pieces else []


def loop(layers: Sequence[int], ministages: int) -> list[tuple[int, int]]:
    """Ministages in model order as `(group, layers)`: groups in turn, each with its layers cut evenly.

    A group without layers, or with fewer than ministages, is passed over in the later turns.
    """
    cuts = [cut_evenly(number, ministages) for number in layers]
    return [(g, own[turn]) for turn in range(ministages) for g, own in enumerate(cuts) if turn < len(own)]


def lay_plan(
    workload: Workload,
    groups: Sequence[Sequence[int]],
    rank_speeds: Sequence[float],
    layers: Sequence[int],
    global_batch: int,
    options: Options,
) -> Plan:
    """The plan for given numbers of layers of each group.

    Args:
        groups: ranks of each, in pipeline order; ranks are 0, 1, 2, ... in that order.
        rank_speeds: by rank, in any unit.
        layers: of each group; embedding goes with the first ministage, norm and head with the last.
    """
    modules = [name for name, _ in workload.layers]
    stages = loop(layers, options.ministages)
    ministages, position = [], 0
    for i, (g, number) in enumerate(stages):
        stop = len(modules) if i == len(stages) - 1 else position + number + (i == 0)
        ministages.append(Ministage(g, tuple(modules[position:stop])))
        position = stop
    return Plan(
        global_batch=global_batch,
        groups=tuple(_lay_group(ranks, rank_speeds, global_batch, options) for ranks in groups),
        ministages=tuple(ministages),
        sequence_length=workload.sequence_length,
        model=workload.model,
    )


def _lay_group(ranks: Sequence[int], speeds: Sequence[float], global_batch: int, options: Options) -> Group:
    rows = share_out(global_batch, [speeds[rank] for rank in ranks])
    assert rows is not None, "no caps"
    shares = [(rank, number, options.rows_per_microbatch) for rank, number in zip(ranks, rows, strict=True)]
    return Group(
        ranks=tuple(ranks),
        microbatches=expand_shares(shares, global_batch),
        zero=options.zero,
        offload=options.offload,
        recompute=options.recompute,
    )
