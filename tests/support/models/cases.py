"""Random training runs over random plans, the same at every start."""

from __future__ import annotations

import random
from dataclasses import replace

from plans import random_plan, with_bounds
from tiny import Case, module_names, over_model, with_groups

from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan

NUM_CASES = 60
MAX_RANKS = 7
BOUNDED_EVERY = 4
"""One in so many bounds microbatches in flight; half of these have one ministage a group."""


def make_case(seed: int, *, max_ranks: int = MAX_RANKS, max_ministages: int = 9) -> Case:
    """A random plan of at most so many ranks and ministages, and random things to do with it."""
    rng = random.Random(seed)
    is_bounded = seed % BOUNDED_EVERY == 0
    while True:
        plan = random_plan(
            rng,
            max_groups=4,
            max_ranks_per_group=4,
            max_ministages_per_group=1 if is_bounded and seed % (2 * BOUNDED_EVERY) else 4,
            max_rows=10,
            round_robin=rng.random() < 0.7,
        )
        is_worth_it = not is_bounded or (len(plan.groups) > 1 and plan.global_batch > 3)
        if plan.num_ranks <= max_ranks and plan.num_ministages <= max_ministages and is_worth_it:
            break
    if rng.random() < 0.3:
        plan = replace(
            plan, groups=tuple(with_unequal_counts(group, plan.global_batch) for group in plan.groups)
        )
    plan, num_layers = over_model(plan, rng)
    if is_bounded:
        plan = with_bounds(plan, rng)
    return Case(
        with_groups(plan, lambda group: replace(group, offload=())),
        num_layers,
        seed,
        tied=rng.random() < 0.5,
        max_norm=rng.choice((None, 0.05, 0.5)),
        evaluate_before=rng.choice(((), (1,), (0, 2))),
        frozen=rng.choice(((), (), (), ("tok_embeddings", "layers.0."), ("layers.0.up", "norm"))),
    )


def other_plan(case: Case, rng: random.Random, *, max_ranks: int, min_ranks: int = 1) -> Plan:
    """Another random plan for the same model and batch."""
    names = module_names(case.num_layers)
    while True:
        plan = random_plan(rng, max_groups=3, max_ranks_per_group=3, max_ministages_per_group=3, max_rows=10)
        fits = min_ranks <= plan.num_ranks <= max_ranks and plan.num_ministages <= len(names)
        if fits and plan.global_batch == case.plan.global_batch:
            break
    count = plan.num_ministages
    cuts = [0, *sorted(rng.sample(range(1, len(names)), count - 1)), len(names)]
    ministages = tuple(
        Ministage(m.group, tuple(names[cuts[i] : cuts[i + 1]])) for i, m in enumerate(plan.ministages)
    )
    return with_groups(replace(plan, ministages=ministages), lambda group: replace(group, offload=()))


def with_unequal_counts(group: Group, global_batch: int) -> Group:
    """ZeRO 3 whose first rank computes row by row and whose last takes the rest at once."""
    ranks = group.flat_ranks
    if len(ranks) == 1 or global_batch < 3:
        return group
    singles = max(2, global_batch // 2)
    microbatches = [Microbatch(ranks[0], row, row + 1) for row in range(singles)]
    if singles < global_batch:
        microbatches.append(Microbatch(ranks[-1], singles, global_batch))
    return replace(group, zero=3, grad_reduce="once", microbatches=tuple(microbatches))


def with_offload(case: Case, rng: random.Random) -> Case:
    """Each group offloads a random part of what it may."""
    kinds = ("optimizer",) if case.plan.bounds_in_flight else OFFLOAD_KINDS

    def change(group: Group) -> Group:
        return replace(group, offload=tuple(kind for kind in kinds if rng.random() < 0.6))

    return replace(case, plan=with_groups(case.plan, change))


CASES = [make_case(seed) for seed in range(NUM_CASES)]
