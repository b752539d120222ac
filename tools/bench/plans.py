"""Plans of the benchmark, made in Python: rows by speed, layers by summed speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from zorselike.plan.plan import Group, Microbatch, Ministage, Plan


def apportion(total: int, weights: Mapping[int, float], least: int = 0) -> dict[int, int]:
    """Whole numbers in proportion to the weights that add up to `total` (largest remainders)."""
    exact = {key: Fraction(weight) for key, weight in weights.items()}
    whole = sum(exact.values())
    spare = total - least * len(exact)
    shares = {key: Fraction(spare) * weight / whole for key, weight in exact.items()}
    given = {key: int(share) for key, share in shares.items()}
    by_remainder = sorted(shares, key=lambda key: (given[key] - shares[key], key))
    for key in by_remainder[: spare - sum(given.values())]:
        given[key] += 1
    return {key: least + number for key, number in given.items()}


def lay_rows(
    speeds: Mapping[int, float], num_rows: int, num_microbatches: int, *, least_rows: int = 1
) -> tuple[Microbatch, ...]:
    """A group's microbatches: every rank's rows by its speed, cut into equally many pieces.

    The pieces of all ranks are laid along the global batch in the order in which they would
    complete. Groups laid like this meet their neighbours' rows in nearly the same order, so
    that no rank waits for one slow microbatch of the group before, and a slow rank's
    microbatches are small instead of late. `least_rows` bounds the size from below.
    """
    rows = apportion(num_rows, speeds)
    counts = apportion(num_microbatches, dict.fromkeys(speeds, 1.0), least=1)
    pieces: list[tuple[float, int, int]] = []
    for rank, own in rows.items():
        count = max(1, min(counts[rank], own // least_rows))
        cuts = [own * k // count for k in range(count + 1)]
        pieces += [
            (cuts[k + 1] / speeds[rank], rank, cuts[k + 1] - cuts[k])
            for k in range(count)
            if cuts[k + 1] > cuts[k]
        ]
    microbatches = []
    start = 0
    for _, rank, size in sorted(pieces):
        microbatches.append(Microbatch(rank, start, start + size))
        start += size
    return tuple(microbatches)


def loop_layers(per_stage: Sequence[int], loops: int) -> tuple[int, ...]:
    """Cuts each stage's layers into `loops` virtual stages, as even as can be, in model order."""
    return tuple(n * (loop + 1) // loops - n * loop // loops for loop in range(loops) for n in per_stage)


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
