"""The generator that all packages' tests draw plans from reaches every corner it promises."""

from __future__ import annotations

import random
from itertools import pairwise

from plans import random_plan


def test_random_plans_are_valid_reproducible_and_varied():
    seen = set()
    for seed in range(2000):
        plan = random_plan(random.Random(seed))
        assert plan.validate() == random_plan(random.Random(seed))
        assert len(plan.groups) <= 6
        assert plan.global_batch <= 24
        assert all(len(group.ranks) <= 8 for group in plan.groups)
        assert all(len(plan.ministages_of_group(g)) <= 8 for g in range(len(plan.groups)))
        num_groups = len(plan.groups)
        assert [m.group for m in plan.ministages] == [s % num_groups for s in range(plan.num_ministages)]
        counts = [[len(own) for own in group.microbatches_by_rank.values()] for group in plan.groups]
        sizes = {m.num_rows for group in plan.groups for m in group.microbatches}
        corners = {
            "several groups": len(plan.groups) > 1,
            "several ministages": plan.num_ministages > len(plan.groups),
            "mixed zero": len({group.zero for group in plan.groups}) > 1,
            "zero 3, unequal counts": any(
                group.zero == 3 and len(set(count)) > 1
                for group, count in zip(plan.groups, counts, strict=True)
            ),
            "zero 2 per microbatch": any(g.zero == 2 and g.grad_reduce == "microbatch" for g in plan.groups),
            "recompute": any(group.recompute == "layer" for group in plan.groups),
            "rank without rows": any(0 in count for count in counts),
            "ragged": len(sizes) > 1,
            "ranks out of order": any(list(g.flat_ranks) != sorted(g.flat_ranks) for g in plan.groups),
            "rows out of order": any(
                list(g.microbatches) != sorted(g.microbatches, key=lambda m: m.start) for g in plan.groups
            ),
        }
        seen |= {corner for corner, reached in corners.items() if reached}
    assert seen == set(corners)


def test_other_orders_of_groups():
    plans = [random_plan(random.Random(seed), round_robin=False) for seed in range(200)]
    assert all(plan.validate() for plan in plans)
    owners = [[m.group for m in plan.ministages] for plan in plans]
    assert any(a == b for groups in owners if len(set(groups)) > 1 for a, b in pairwise(groups))


def test_limits_hold():
    for seed in range(100):
        plan = random_plan(
            random.Random(seed), max_groups=2, max_ranks_per_group=3, max_ministages_per_group=2, max_rows=5
        )
        assert plan.num_ranks <= 6
        assert plan.num_ministages <= 4
        assert plan.global_batch <= 5
