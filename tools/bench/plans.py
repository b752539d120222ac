"""Plans of the benchmark, made in Python: rows by speed, layers by summed speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.plan.shares import apportion, deal_rows

from second_simulator.meshes import loop_layers


def lay_rows(
    speeds: Mapping[int, float], num_rows: int, num_microbatches: int, *, least_rows: int = 1
) -> tuple[Microbatch, ...]:
    """A group's microbatches: every rank's rows by its speed, cut into equally many pieces.

    The pieces of all ranks are laid along the global batch in the order in which they would
    complete. Groups laid like this meet their neighbours' rows in nearly the same order, so
    that no rank waits for one slow microbatch of the group before, and a slow rank's
    microbatches are small instead of late. `least_rows` bounds the size from below.
    """
    rows = dict(zip(speeds, apportion(num_rows, list(speeds.values())), strict=True))
    others = apportion(num_microbatches - len(speeds), [1.0] * len(speeds))
    counts = {rank: 1 + number for rank, number in zip(speeds, others, strict=True)}
    pieces: list[tuple[float, int, int]] = []
    for rank, own in rows.items():
        count = max(1, min(counts[rank], own // least_rows))
        cuts = [own * k // count for k in range(count + 1)]
        pieces += [
            (cuts[k + 1] / speeds[rank], rank, cuts[k + 1] - cuts[k])
            for k in range(count)
            if cuts[k + 1] > cuts[k]
        ]
    return deal_rows(sorted(pieces))


def make_plan(
    groups: Sequence[Sequence[int]],
    speeds: Sequence[float],
    layers: Sequence[int],
    *,
    num_rows: int,
    num_microbatches: int | Sequence[int],
    ministages: int,
    zero: int | Sequence[int] = 2,
    least_rows: int = 1,
) -> tuple[Plan, tuple[int, ...]]:
    """A plan of round-robin ministages and the number of layers of each ministage.

    `layers` are those of each group. A ministage is one module, named by its number, that
    stands for all of its layers.
    """
    counts = [num_microbatches] * len(groups) if isinstance(num_microbatches, int) else num_microbatches
    zeros = [zero] * len(groups) if isinstance(zero, int) else zero
    made = tuple(
        Group(
            ranks=tuple(ranks),
            microbatches=lay_rows(
                {rank: speeds[rank] for rank in ranks}, num_rows, counts[g], least_rows=least_rows
            ),
            zero=zeros[g],
        )
        for g, ranks in enumerate(groups)
    )
    sizes = loop_layers(layers, ministages)
    order = [(i % len(groups), size) for i, size in enumerate(sizes) if size]
    return (
        Plan(
            global_batch=num_rows,
            groups=made,
            ministages=tuple(Ministage(group, (str(i),)) for i, (group, _) in enumerate(order)),
        ),
        tuple(size for _, size in order),
    )


def spread_modules(
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    speeds: Sequence[float],
    *,
    num_rows: int,
    ministages: int,
    zero: int,
) -> Plan:
    """A plan for a real model: its modules cut into round-robin ministages of equal length."""
    plan, _ = make_plan(
        groups,
        speeds,
        [ministages] * len(groups),
        num_rows=num_rows,
        num_microbatches=num_rows // 2,
        ministages=ministages,
        zero=zero,
    )
    count = plan.num_ministages
    cuts = [len(names) * i // count for i in range(count + 1)]
    return replace(
        plan,
        ministages=tuple(
            Ministage(stage.group, tuple(names[cuts[i] : cuts[i + 1]]))
            for i, stage in enumerate(plan.ministages)
        ),
    )
