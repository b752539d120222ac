from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plans, random_plan

from zorselike.plan import (
    ClusterError,
    Device,
    Group,
    Microbatch,
    Ministage,
    Plan,
    PlanError,
    Process,
    match_devices,
)

GROUP = Group(ranks=(0, 1, 2, 3), microbatches=(Microbatch(0, 0, 4),))
BARE = Plan(global_batch=4, groups=(GROUP,), ministages=(Ministage(0, ("layers.0",)),))
DEVICES = (
    Device(0, "fast.lan", 0, "A100"),
    Device(1, "fast.lan", 1, "A100"),
    Device(2, "fast.lan", 2, "A100"),
    Device(3, "slow.lan", 0, "T4"),
)
PLAN = replace(BARE, devices=DEVICES).validate()
RUNNING = [
    Process("slow.lan", 0, "T4", 0),
    Process("fast.lan", 0, "A100", 1),
    Process("fast.lan", 1, "A100", 2),
    Process("fast.lan", 2, "A100", 3),
]


def test_nodes_may_come_up_in_any_order():
    assert match_devices(PLAN, RUNNING) == {0: 3, 1: 0, 2: 1, 3: 2}


@given(plans(max_groups=3), st.randoms(use_true_random=False))
def test_any_launch_order_finds_every_plan_rank(plan, rng):
    places = [(node, local) for node in ("a", "b", "c.d") for local in range(8)]
    places = rng.sample(places, plan.num_ranks)
    devices = [Device(rank, *place) for rank, place in enumerate(places)]
    order = list(range(plan.num_ranks))
    rng.shuffle(order)
    matched = match_devices(
        replace(plan, devices=tuple(devices)),
        [(*places[rank], "cpu", process_rank) for process_rank, rank in enumerate(order)],
    )
    assert matched == dict(enumerate(order))


@pytest.mark.parametrize(("in_plan", "running"), [("fast", "fast.lan"), ("fast.lan", "fast")])
def test_short_hostnames_match(in_plan, running):
    devices = tuple(replace(d, node=d.node.replace("fast.lan", in_plan)) for d in DEVICES)
    processes = [p._replace(node=p.node.replace("fast.lan", running)) for p in RUNNING]
    assert match_devices(replace(BARE, devices=devices), processes) == {0: 3, 1: 0, 2: 1, 3: 2}


def test_types_are_compared_where_both_name_one():
    untyped = replace(BARE, devices=tuple(replace(d, type="") for d in DEVICES))
    assert match_devices(untyped, RUNNING) == {0: 3, 1: 0, 2: 1, 3: 2}
    assert match_devices(PLAN, [p._replace(type="") for p in RUNNING]) == {0: 3, 1: 0, 2: 1, 3: 2}
    assert match_devices(PLAN, [p._replace(type=p.type.lower()) for p in RUNNING]) == {0: 3, 1: 0, 2: 1, 3: 2}


def test_without_devices_ranks_are_taken_as_they_are():
    assert match_devices(BARE, RUNNING) == {0: 0, 1: 1, 2: 2, 3: 3}
    plan = random_plan(random.Random(1))
    processes = [("node", rank, "cpu", rank) for rank in range(plan.num_ranks)]
    assert match_devices(plan, processes) == {rank: rank for rank in range(plan.num_ranks)}


@pytest.mark.parametrize(
    ("plan", "processes", "messages"),
    [
        (BARE, RUNNING[:3], ["the plan is for 4 ranks, 3 processes run", "start 4 processes"]),
        (BARE, RUNNING[:1], ["the plan is for 4 ranks, 1 process run"]),
        (
            PLAN,
            RUNNING[:3],
            [
                "the plan is for 4 ranks, 3 processes run",
                "plan rank 2 is local rank 2 of node fast.lan, where no such process runs",
            ],
        ),
        (
            PLAN,
            [p._replace(rank=p.rank - 1) for p in RUNNING[1:]],
            ["4 ranks, 3 processes", "node slow.lan of the plan does not run"],
        ),
        (
            PLAN,
            [*RUNNING, Process("other", 0, "T4", 4)],
            ["4 ranks, 5 processes", "node other runs but is not in the plan"],
        ),
        (
            PLAN,
            [*RUNNING, Process("slow.lan", 1, "T4", 4)],
            ["4 ranks, 5 processes", "local rank 1 of node slow.lan runs but is not in the plan"],
        ),
        (
            PLAN,
            [RUNNING[0]._replace(type="V100"), *RUNNING[1:]],
            ["plan rank 3 (node slow.lan, local rank 0) is 'T4' in the plan, 'V100' runs"],
        ),
        (
            PLAN,
            [p._replace(node="x" + p.node) for p in RUNNING],
            ["none of the plan's nodes runs", "fast.lan, slow.lan", "xfast.lan, xslow.lan"],
        ),
        (
            replace(BARE, devices=tuple(replace(d, node=d.node.split(".")[0]) for d in DEVICES)),
            [*RUNNING[:3], RUNNING[3]._replace(node="fast.wan")],
            ["node fast of the plan may be any of fast.lan, fast.wan"],
        ),
        (
            replace(BARE, devices=(replace(DEVICES[0], node="fast"), *DEVICES[1:])),
            RUNNING,
            ["nodes fast and fast.lan of the plan are both fast.lan"],
        ),
    ],
)
def test_differences_are_named(plan, processes, messages):
    with pytest.raises(PlanError) as error:
        match_devices(plan, processes)
    for message in messages:
        assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        (
            [*RUNNING[:3], RUNNING[3]._replace(local_rank=1)],
            "processes 2 and 3 .* local rank 1 of node fast.lan",
        ),
        ([*RUNNING[:3], RUNNING[3]._replace(rank=2)], "must be 0 to 3, each once"),
    ],
)
def test_processes_that_claim_one_place_are_refused(processes, message):
    with pytest.raises(ClusterError, match=message):
        match_devices(PLAN, processes)


def test_a_replica_runs_on_like_devices_of_one_node():
    replica = replace(GROUP, ranks=((0, 1, 2), 3))
    plan = replace(BARE, groups=(replica,), sequence_length=8).validate()
    types = ("A100", "", "A100", "T4")
    alike = [Process("fast", rank, type_, rank) for rank, type_ in enumerate(types)]
    assert match_devices(plan, alike) == {0: 0, 1: 1, 2: 2, 3: 3}
    mixed = [*alike[:2], Process("fast", 2, "V100", 2), alike[3]]
    with pytest.raises(PlanError, match=r"^groups\[0\].ranks\[0\] .*: rank 0 is 'A100' and rank 2 'V100'"):
        match_devices(plan, mixed)
    apart = [*alike[:2], Process("slow", 0, "A100", 2), alike[3]]
    with pytest.raises(PlanError, match=r"across nodes: rank 1 is on 'fast' and rank 2 on 'slow'"):
        match_devices(plan, apart)
    # Where the plan names no types, those that run count.
    untyped = replace(plan, devices=tuple(Device(rank, "fast", rank) for rank in range(4)))
    with pytest.raises(PlanError, match="unlike devices"):
        match_devices(untyped, mixed)
