"""What the planner proposes with tensor-parallel replicas trains as a single process does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import RunRanks
from replica_cases import ReplicaCase
from tiny import assert_same, module_names, train_all_planned, train_all_single

from zorselike.cost.catalogue import CPU
from zorselike.cost.profile import LayerTimes, Profile, Source, UpdateTime
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.plan.workload import Workload
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search.search import search_plans
from zorselike.profiler.workload.module_workload import measure_workload

pytestmark = pytest.mark.pooled

NUM_LAYERS, TOKENS = 3, 16
GIVEN = Source("given")
ANY = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, tuple(module_names(NUM_LAYERS))),))


def measure() -> Workload:
    """Of the model that is trained."""
    tokens = torch.zeros(2, TOKENS, dtype=torch.int64, device="meta")
    model = ReplicaCase(ANY, NUM_LAYERS).model()
    return measure_workload(model, tokens, dtype="float64", modules=module_names(NUM_LAYERS))


def profile_of(workload: Workload) -> Profile:
    """A layer takes 10 ms a row each way, so that links of any speed are nothing beside it."""
    times = [
        LayerTimes(
            kind=kind,
            device=CPU,
            dtype=workload.dtype,
            sequence_length=TOKENS,
            rows=(1, 2, 4),
            forward_s=(0.01, 0.02, 0.04),
            backward_s=(0.02, 0.04, 0.08),
            source=GIVEN,
        )
        for kind in workload.kinds
    ]
    update = UpdateTime(device=CPU, dtype=workload.dtype, seconds_per_parameter=1e-9, source=GIVEN)
    return Profile(model=workload.model, layers=tuple(times), updates=(update,))


def plan_for(sizes: tuple[int, ...], global_batch: int, fixed: Fixed) -> Plan:
    """Of nodes with so many CPU ranks."""
    workload = measure()
    nodes = tuple(
        Node(name=f"n{i}", devices=(CPU,) * number, host_memory_bytes=2**34, fabric=Link(10e9))
        for i, number in enumerate(sizes)
    )
    problem = PlanProblem(
        workload=workload,
        cluster=Cluster(nodes=nodes, default_link=Link(1e9, 1e-4)),
        profile=profile_of(workload),
        global_batch=global_batch,
        fixed=fixed,
    )
    plan = search_plans(problem, budget_s=1.0, top=1, all_devices=True).best.case.plan
    return replace(plan, devices=())


def test_plans_with_replicas_train_as_a_single_process_does(run_ranks: RunRanks) -> None:
    asked = [
        ((4,), 5, Fixed(tensor_parallel=4, groups=((0, 1, 2, 3),))),
        ((2, 1, 1), 7, Fixed(tensor_parallel=2, groups=((0, 1, 2, 3),))),
        ((2, 1, 1), 6, Fixed(tensor_parallel=2, groups=((0, 1), (2, 3)))),
        # Two rows for four ranks: only together all of them have something to do.
        ((2, 2), 2, Fixed(groups=((0, 1, 2, 3),))),
    ]
    plans = [plan_for(*question) for question in asked]
    degrees = [[[r.degree for r in group.replicas] for group in plan.groups] for plan in plans]
    assert degrees[:3] == [[[4]], [[2, 1, 1]], [[2], [1, 1]]]
    assert plans[3].has_replicas and plans[3].num_ranks == 4
    cases = [ReplicaCase(plan, NUM_LAYERS, seed, num_steps=2) for seed, plan in enumerate(plans)]
    (expected,) = run_ranks(train_all_single, 1, cases, timeout=120)
    found = run_ranks(train_all_planned, 4, cases, timeout=120)
    for number, case in enumerate(cases):
        assert_same(found[0][number], expected[number], case)
