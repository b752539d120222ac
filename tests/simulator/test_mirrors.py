"""Host memory of copies and mirrors: who holds what, and that the planner counts it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from device_problems import WORKLOAD, make_nodes, make_problem
from hypothesis import given
from hypothesis import strategies as st
from searched_problems import Bench, draw_problem

from zorselike.cost.parameter_bytes import ParameterBytes
from zorselike.errors import PlanError
from zorselike.planner.candidate.to_plan import make_plan
from zorselike.planner.search.search import search_plans
from zorselike.simulator.mirrors import State, host_copies, list_states, state_of
from zorselike.simulator.simulated_plan import SimulatedPlan


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), st.integers(0, 1000))
def test_every_state_is_held_by_its_rank_and_by_one_other(nodes: list[str], seed: int) -> None:
    rng = random.Random(seed)
    states = [State(rng.randrange(1000), rng.randrange(100)) for _ in nodes]
    held = host_copies(states, nodes)
    whole = sum(2 * changing + frozen for changing, frozen in states)
    assert sum(held) == whole * (1 if len(nodes) == 1 else 2)
    for rank, (changing, frozen) in enumerate(states):
        assert held[rank] >= 2 * changing + frozen
        if set(nodes) != {nodes[rank]}:  # No node holds all that there is of its own ranks.
            own = [r for r, node in enumerate(nodes) if node == nodes[rank]]
            rest = sum(held[r] for r in range(len(nodes)) if r not in own)
            assert rest >= sum(2 * states[r].changing + states[r].frozen for r in own)


def test_of_a_layer_masters_and_moments_count_and_of_frozen_weights_themselves() -> None:
    kind = replace(next(iter(WORKLOAD.kinds.values())), num_parameters=100, num_trainable=60)
    assert state_of(kind, ParameterBytes(4, 2)) == State(60 * 12, 40 * 4)
    assert state_of(kind, ParameterBytes(2, 2)) == State(60 * 12, 40 * 2)


def find(*host_bytes: int | None, budget_s: float = 0.5, **options: object) -> SimulatedPlan:
    """The best plan of three nodes, of which the first ones have so much memory."""
    limits = (*host_bytes, *(None for _ in range(3 - len(host_bytes))))
    nodes = [make_nodes(f"n{i}-", "A100-40 T4", host_memory_bytes=limit) for i, limit in enumerate(limits)]
    return search_plans(make_problem(*nodes, global_batch=8, **options), budget_s=budget_s, top=1).best.case


def test_the_planner_counts_them_where_a_job_is_elastic() -> None:
    plain, mirrored = find(), find(is_mirrored=True)
    assert plain.mirror_bytes == {} and plain.host_bytes == plain.offloaded_bytes
    states = list_states(mirrored.plan, mirrored.workload)
    assert sum(mirrored.mirror_bytes.values()) == pytest.approx(2 * sum(s.held for s in states), abs=8)
    both = Counter(mirrored.mirror_bytes) + Counter(mirrored.offloaded_bytes)
    assert mirrored.host_bytes == dict(both)
    needed = mirrored.host_bytes[0]
    # Another plan, which leaves room there.
    tight = find(needed * 4 // 5, is_mirrored=True, budget_s=2.0)
    assert tight.host_bytes.get(0, 0) <= needed * 4 // 5
    assert not any(map(tight.is_host_overfull, tight.host_bytes))
    little = (needed // 3,) * 3
    assert find(*little).plan.num_ranks
    with pytest.raises(PlanError, match="of host memory of each of nodes n0-0, n1-0"):
        find(*little, is_mirrored=True)


@pytest.mark.parametrize("seed", range(5))
def test_what_the_search_estimates_is_what_a_plan_needs(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(draw_problem(rng, is_mirrored=True))
    for _ in range(6):
        candidate = bench.draw_candidate(rng)
        if candidate is not None:
            plan = make_plan(candidate, bench.problem, bench.table).validate()
            case = bench.problem.setting.simulate(plan)
            found = bench.memory._mirror(candidate)
            assert dict(found) == pytest.approx(case.mirror_bytes, abs=plan.num_ranks)
