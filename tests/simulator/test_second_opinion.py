"""CPU ranks without wires take what the runtime's benchmark computes as its bound, by code of its own.

Not with ZeRO 3: there a rank waits for its rows before it joins the first gather, which the bound leaves out.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import volume
from plain_costs import PlainNetwork, make_costs
from schedules import random_spec

from zorselike.schedule import build
from zorselike.simulator import simulate

from second_simulator import actions


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(4))
def test_the_benchmark_s_simulation_agrees(block: int) -> None:
    for number in volume.part(range(20)):
        rng = random.Random(f"{block}/{number}")
        spec = random_spec(rng, small=number % 10 > 0)
        groups = tuple(replace(group, offload=(), zero=min(group.zero, 2)) for group in spec.plan.groups)
        plan = replace(spec.plan, groups=groups)
        lists = build(replace(spec, plan=plan, ties=()))
        ranks = sorted(plan.group_of_rank)
        workload = actions.Workload(
            seconds_of_rank=tuple(rng.choice([1.0, 1.3, 4.7]) for _ in ranks),
            layers_of_ministage=tuple(rng.randint(1, 3) for _ in plan.ministages),
        )

        def seconds(rank: int, i: int, rows: int, w: actions.Workload = workload) -> float:
            return actions.compute_s(rows, w.layers_of_ministage[i], w.seconds_of_rank[rank])

        # All ranks in one node: transfers and collectives wait for each other and take no time.
        costs = make_costs(
            plan,
            forward=seconds,
            network=PlainNetwork([0] * len(ranks)),
            row_bytes=1,
            unit_bytes=1,
            cpu=True,
            eager_bytes=math.inf,
        )
        found = simulate(plan, lists, costs, num_steps=1)
        expected = actions.simulate(plan, lists, workload)
        assert found.iteration_s == pytest.approx(expected.makespan_s, rel=1e-9)
        for times, busy_s in zip(found.ranks, expected.busy_s, strict=True):
            assert times.busy_s == pytest.approx(busy_s)
