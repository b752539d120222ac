"""1F1B and interleaved 1F1B: their orders, and that the checker finds nothing wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_costs import make_costs
from schedules import as_checked

from zorselike.cost.memory import walk_memory
from zorselike.plan.plan import GradReduce, Group, Microbatch, Ministage, Plan
from zorselike.schedule import Action, ScheduleSpec, build
from zorselike.schedule.actions import COMPUTE
from zorselike.schedule.checker.check import check
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.lowering.lower import lower
from zorselike.schedule.orders.one_f_one_b import one_f_one_b_blocking
from zorselike.simulator import simulate

Builder = Callable[[ScheduleSpec], dict[int, list[Action]]]


def build_blocking(spec: ScheduleSpec) -> dict[int, list[Action]]:
    return lower(spec, one_f_one_b_blocking(spec))


def even_plan(
    num_groups: int,
    num_microbatches: int,
    *,
    ministages: int = 1,
    sizes: tuple[int, ...] = (1,),
    zero: int = 2,
    grad_reduce: GradReduce = "once",
) -> Plan:
    """Groups of `sizes` ranks, in turn; every microbatch of 4 rows is cut evenly among a group's ranks."""
    groups = []
    for g in range(num_groups):
        size = sizes[g % len(sizes)]
        first = sum(len(group.ranks) for group in groups)
        ranks = tuple(range(first, first + size))
        microbatches = tuple(
            Microbatch(rank, 4 * m + 4 * r // size, 4 * m + 4 * (r + 1) // size)
            for m in range(num_microbatches)
            for r, rank in enumerate(ranks)
        )
        groups.append(Group(ranks, microbatches, zero=zero, grad_reduce=grad_reduce))
    modules = tuple(Ministage(i % num_groups, (f"layers.{i}",)) for i in range(num_groups * ministages))
    return Plan(4 * num_microbatches, tuple(groups), modules).validate()


def order(lists: dict[int, list[Action]], rank: int) -> str:
    return " ".join(action.text for action in lists[rank] if action.kind in COMPUTE)


def test_the_order_of_1f1b() -> None:
    lists = build(ScheduleSpec(even_plan(3, 4)), "1f1b")
    assert order(lists, 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert order(lists, 1) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert order(lists, 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


def test_the_order_of_interleaved_1f1b() -> None:
    """As Figure 4 of Narayanan et al. 2021, with two devices."""
    lists = build(ScheduleSpec(even_plan(2, 4, ministages=2)), "interleaved")
    assert order(lists, 0) == ("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3")
    assert order(lists, 1) == ("1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3")


def test_transfers_that_block_stand_as_in_deepspeed() -> None:
    lists = build_blocking(ScheduleSpec(even_plan(2, 2, zero=0)))
    assert [a.text for a in lists[0]] == [
        *("0F0", "0SEND_F0@1[0:4]", "0F1", "0RECV_B0@1[0:4]", "0SEND_F1@1[4:8]", "0B0"),
        *("0RECV_B1@1[4:8]", "0B1", "0REDUCE_GRAD", "0STEP"),
    ]
    assert [a.text for a in lists[1]] == [
        *("1RECV_F0@0[0:4]", "1F0", "1B0", "1SEND_B0@0[0:4]", "1RECV_F1@0[4:8]", "1F1", "1B1"),
        *("1SEND_B1@0[4:8]", "1REDUCE_GRAD", "1STEP"),
    ]


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_the_checker_accepts_them_and_they_end(rng: random.Random) -> None:
    num_groups, ministages = rng.randint(1, 4), rng.randint(1, 3)
    interleaved = ministages > 1 or rng.random() < 0.3
    count = num_groups * rng.randint(1, 3) if interleaved else rng.randint(1, 7)
    zero = rng.randint(0, 3)
    plan = even_plan(
        num_groups,
        count,
        ministages=ministages if interleaved else 1,
        sizes=rng.choice([(1,), (2,), (2, 4), (4, 1), (1, 2)]),
        zero=zero,
        grad_reduce=rng.choice(["once", "microbatch"]) if zero == 2 else "once",
    )
    trained = tuple(rng.random() < 0.8 for _ in plan.ministages)
    own = [i for i, trains in enumerate(trained) if trains]
    ties = ((own[0], own[-1]),) if len(own) > 1 and rng.random() < 0.3 else ()
    spec = ScheduleSpec(
        plan, trainable=trained, ties=ties, defer_steps=rng.random() < 0.3, masters=rng.random() < 0.5
    )
    builders: list[Builder] = [partial(build, order="interleaved")]
    if not interleaved:
        builders = [partial(build, order="1f1b"), build_blocking]
    for builder in builders:
        lists = builder(spec)
        check(as_checked(spec), lists)
        costs = make_costs(
            plan,
            row_bytes=1,
            unit_bytes=2,
            tie_bytes=dict.fromkeys(ties, 1),
            transfers_block=builder is not builders[0],
            cpu=rng.random() < 0.5,
        )
        found = simulate(plan, lists, costs, num_steps=1)
        for rank, times in enumerate(found.ranks):
            rows = sum(microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank))
            assert times.forward_s == pytest.approx(rows * len(plan.ministages_of_rank(rank)))
            assert found.iteration_s >= (times.forward_s + times.backward_s) * (1 - 1e-9)


@pytest.mark.parametrize("num_groups, num_microbatches", [(1, 3), (2, 1), (3, 2), (4, 8), (5, 3)])
@pytest.mark.parametrize("blocking", [False, True])
def test_the_bubble_of_1f1b(num_groups: int, num_microbatches: int, blocking: bool) -> None:
    plan = even_plan(num_groups, num_microbatches)
    spec = ScheduleSpec(plan)
    lists = build_blocking(spec) if blocking else build(spec, "1f1b")
    found = simulate(plan, lists, make_costs(plan, transfers_block=blocking))
    assert found.iteration_s == pytest.approx(12 * (num_microbatches + num_groups - 1))


@pytest.mark.parametrize("num_groups, num_microbatches, ministages", [(2, 4, 2), (4, 8, 2), (4, 4, 3)])
def test_the_bubble_of_interleaved_1f1b(num_groups: int, num_microbatches: int, ministages: int) -> None:
    plan = even_plan(num_groups, num_microbatches, ministages=ministages)
    found = simulate(plan, build(ScheduleSpec(plan), "interleaved"), make_costs(plan, forward=1 / ministages))
    assert found.iteration_s == pytest.approx(12 * (num_microbatches + (num_groups - 1) / ministages))


def test_1f1b_keeps_the_activations_of_as_many_microbatches_as_stages_follow() -> None:
    plan = even_plan(3, 8)
    costs = make_costs(plan, row_bytes=1, sizes={"boundary_bytes_per_row": 0})
    for rank in range(3):
        one_f_one_b, ours = (
            walk_memory(plan, rank, lists[rank], costs.sizes[rank]).device["activations"]
            for lists in (build(ScheduleSpec(plan), "1f1b"), build(ScheduleSpec(plan)))
        )
        assert (one_f_one_b, ours) == (4 * (3 - rank), 4 * (8 if rank < 2 else 1))


@pytest.mark.parametrize(
    "zero, grad_reduce", [(0, "once"), (1, "once"), (2, "once"), (2, "microbatch"), (3, "once")]
)
@pytest.mark.parametrize("counts", [(3, 1), (2, 2), (4, 0)])
def test_one_group_may_have_different_numbers_of_microbatches(
    zero: int, grad_reduce: GradReduce, counts: tuple[int, int]
) -> None:
    owners = [rank for rank, count in enumerate(counts) for _ in range(count)]
    group = Group(
        (0, 1),
        tuple(Microbatch(rank, row, row + 1) for row, rank in enumerate(owners)),
        zero=zero,
        grad_reduce=grad_reduce,
    )
    plan = Plan(4, (group,), (Ministage(0, ("a",)),)).validate()
    spec = ScheduleSpec(plan)
    lists = build(spec, "1f1b")
    check(as_checked(spec), lists)
    assert order(lists, 0).startswith("0F0 0B0 0F1 0B1")
    assert simulate(plan, lists, make_costs(plan, unit_bytes=1)).iteration_s > 3 * counts[0]


def test_plans_of_other_shapes_are_refused() -> None:
    two = even_plan(2, 2, ministages=2)
    with pytest.raises(ScheduleError, match="one ministage a group"):
        build(ScheduleSpec(two), "1f1b")
    with pytest.raises(ScheduleError, match="3 microbatches for 2 groups; give a multiple"):
        build(ScheduleSpec(even_plan(2, 3, ministages=2)), "interleaved")
    groups = (
        Group((0,), (Microbatch(0, 0, 2), Microbatch(0, 2, 4))),
        Group((1,), (Microbatch(1, 0, 4),)),
    )
    ministages = (Ministage(0, ("a",)), Ministage(1, ("b",)))
    with pytest.raises(ScheduleError, match="rank 1 has 1 microbatches and rank 0 has 2"):
        build(ScheduleSpec(Plan(4, groups, ministages)), "1f1b")
    turned = (groups[0], Group((1,), (Microbatch(1, 2, 4), Microbatch(1, 0, 2))))
    with pytest.raises(ScheduleError, match=r"rows \[0:2\) are in microbatch 0 of ministage 0"):
        build(ScheduleSpec(Plan(4, turned, ministages)), "1f1b")
    with pytest.raises(ScheduleError, match="visit all groups in turn"):
        build(ScheduleSpec(Plan(4, turned, (*ministages, Ministage(1, ("c",))))), "interleaved")
    offloading = (groups[0], Group((1,), turned[1].microbatches, offload=("activations",)))
    with pytest.raises(ScheduleError, match="group 1 offloads"):
        build(ScheduleSpec(Plan(4, offloading, ministages)), "1f1b")
