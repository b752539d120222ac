"""Random valid plans, seeded, for the tests of every package."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from zorselike.plan.plan import OFFLOAD_KINDS, GradReduce, Group, Microbatch, Ministage, Plan, Recompute
from zorselike.schedule.orders.in_flight import least_in_flight


def random_plan(
    rng: random.Random,
    *,
    max_groups: int = 6,
    max_ranks_per_group: int = 8,
    max_ministages_per_group: int = 8,
    max_rows: int = 24,
    round_robin: bool = True,
) -> Plan:
    """A valid plan drawn from `rng`: the same state gives the same plan.

    Microbatches are ragged and differ by rank and by group, ranks may have no rows, rank
    numbers may interleave between groups, and `zero`, `grad_reduce`, `overlap_grad_reduce`,
    `recompute` and `offload` differ by group. Modules are `layers.0`, `layers.1`, ..., one to three
    a ministage.

    Args:
        rng: where all randomness comes from.
        max_groups: groups are 1 to this many.
        max_ranks_per_group: ranks of each group are 1 to this many.
        max_ministages_per_group: ministages of each group are 1 to this many.
        max_rows: the global batch is 1 to this many rows.
        round_robin: whether all groups own equally many ministages, visited in turn;
            otherwise any number in any order.
    """
    num_groups = rng.randint(1, max_groups)
    global_batch = rng.randint(1, max_rows)
    groups = [
        _random_group(rng, ranks, global_batch)
        for ranks in _random_ranks(rng, num_groups, max_ranks_per_group)
    ]
    modules = 0
    ministages = []
    for group in _random_owners(rng, num_groups, max_ministages_per_group, round_robin):
        first, modules = modules, modules + rng.randint(1, 3)
        ministages.append(Ministage(group, tuple(f"layers.{i}" for i in range(first, modules))))
    return Plan(global_batch=global_batch, groups=tuple(groups), ministages=tuple(ministages))


def plans(**limits: int | bool) -> st.SearchStrategy[Plan]:
    """Hypothesis strategy over `random_plan`; `limits` are its keywords. Shrinks the seed only."""
    return st.integers(0, 2**32 - 1).map(lambda seed: random_plan(random.Random(seed), **limits))


def with_bounds(plan: Plan, rng: random.Random) -> Plan:
    """The plan with random bounds on microbatches in flight, none too low, in one group at least."""
    must = rng.randrange(len(plan.groups))
    groups = []
    for g, (group, least) in enumerate(zip(plan.groups, least_in_flight(plan), strict=True)):
        bounds = (least, least + 1, least + rng.randint(0, 4))
        bound = rng.choice(bounds if g == must else (*bounds, None))
        kept = tuple(kind for kind in group.offload if kind == "optimizer")
        if len(plan.ministages_of_group(g)) > 1 and group.zero == 2 and group.grad_reduce == "once":
            zero: dict[str, Any] = {"zero": 1} if rng.random() < 0.4 else {"grad_reduce": "microbatch"}
            group = replace(group, **zero)
        groups.append(replace(group, max_in_flight=bound, offload=kept))
    return replace(plan, groups=tuple(groups))


def with_replicas(plan: Plan, rng: random.Random) -> Plan:
    """The plan with ranks joined to tensor-parallel replicas of random degrees, by chance none in a group;
    a replica computes the microbatches that its ranks had, whose order stays."""
    groups = []
    for group in plan.groups:
        largest = rng.choice([degree for degree in (1, 2, 2, 3, 4, 4, 6) if degree <= len(group.flat_ranks)])
        left, entries = list(group.flat_ranks), []
        while left:
            fitting = [d for d in range(1, largest + 1) if largest % d == 0 and d <= len(left)]
            degree = rng.choice(fitting) if entries else largest
            entries.append(tuple(left[:degree]) if degree > 1 else left[0])
            left = left[degree:]
        rng.shuffle(entries)
        joined = replace(group, ranks=tuple(entries))
        booked = tuple(replace(m, rank=joined.replica_of(m.rank).first) for m in group.microbatches)
        groups.append(replace(joined, microbatches=booked))
    largest = max(group.degree for group in groups)
    return replace(plan, groups=tuple(groups), sequence_length=largest + rng.randint(0, 9))


def _random_ranks(rng: random.Random, num_groups: int, max_ranks: int) -> list[tuple[int, ...]]:
    """Ranks 0, 1, 2, ... dealt to the groups, in half of the plans not in order."""
    sizes = [rng.randint(1, max_ranks) for _ in range(num_groups)]
    ranks = list(range(sum(sizes)))
    if rng.random() < 0.5:
        rng.shuffle(ranks)
    return [tuple(ranks.pop(0) for _ in range(size)) for size in sizes]


def _random_owners(rng: random.Random, num_groups: int, max_ministages: int, round_robin: bool) -> list[int]:
    """The group of each ministage in model order."""
    if round_robin:
        return list(range(num_groups)) * rng.randint(1, max_ministages)
    owners = [group for group in range(num_groups) for _ in range(rng.randint(1, max_ministages))]
    rng.shuffle(owners)
    return owners


def _random_group(rng: random.Random, ranks: tuple[int, ...], global_batch: int) -> Group:
    zero = rng.randint(0, 3)
    reduces: Sequence[GradReduce] = ("once", "microbatch") if zero >= 2 else ("once",)
    recomputes: Sequence[Recompute] = ("none", "layer")
    group = Group(
        ranks=ranks,
        microbatches=_random_microbatches(rng, ranks, global_batch),
        zero=zero,
        grad_reduce=rng.choice(reduces),
        recompute=rng.choice(recomputes),
    )
    # Drawn from generators of their own, so that the rest of a seed's plan is what it was before.
    overlap = random.Random(f"overlap {ranks}{group.microbatches}").random() < 0.6
    offload_rng = random.Random(f"{ranks}{group.microbatches}")
    wanted = offload_rng.random() < 0.5
    offload = tuple(k for k in OFFLOAD_KINDS if wanted and offload_rng.random() < 0.6)
    return replace(group, offload=offload, overlap_grad_reduce=overlap)


def _random_microbatches(
    rng: random.Random, ranks: tuple[int, ...], global_batch: int
) -> tuple[Microbatch, ...]:
    """The rows cut at random points, each piece given to a random one of the ranks that work."""
    working = rng.sample(ranks, rng.randint(1, len(ranks))) if rng.random() < 0.5 else list(ranks)
    most = rng.choice((1, 2, 3, 4, 8, global_batch))
    microbatches = []
    start = 0
    while start < global_batch:
        stop = min(start + rng.randint(1, most), global_batch)
        microbatches.append(Microbatch(rng.choice(working), start, stop))
        start = stop
    if rng.random() < 0.25:
        rng.shuffle(microbatches)
    return tuple(microbatches)
