"""A plan with a single ministage accumulates gradients: each microbatch forward and at once backward."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import volume
from plans import random_plan

from zorselike.cost import MinistageBytes, walk_memory
from zorselike.plan.plan import OFFLOAD_KINDS, GradReduce, Group, Microbatch, Ministage, Plan
from zorselike.schedule import ScheduleSpec, build, format_actions
from zorselike.schedule.checker.check import check

SIZES = MinistageBytes(
    gathered_bytes=20,
    shard_bytes=10,
    gradient_bytes=20,
    gradient_shard_bytes=10,
    state_bytes=20,
    activation_bytes_per_row=50,
    working_bytes_per_row=7,
    largest_unit_bytes=5,
    largest_unit_gradient_bytes=5,
)


def one_ministage(*counts: int, zero: int = 2, grad_reduce: GradReduce = "once") -> Plan:
    """One group; rank `r` has `counts[r]` microbatches of one row."""
    owners = [rank for rank, count in enumerate(counts) for _ in range(count)]
    microbatches = tuple(Microbatch(rank, row, row + 1) for row, rank in enumerate(owners))
    group = Group(tuple(range(len(counts))), microbatches, zero=zero, grad_reduce=grad_reduce)
    return Plan(len(owners), (group,), (Ministage(0, ("layers.0",)),)).validate()


def with_offload(plan: Plan, offload: tuple[str, ...]) -> Plan:
    return replace(plan, groups=tuple(replace(group, offload=offload) for group in plan.groups))


@pytest.mark.parametrize(
    ("zero", "grad_reduce", "most", "fewer"),
    [
        (0, "once", "0F0 0B0 0F1 0B1 0REDUCE_GRAD 0STEP", "0F0 0B0 0REDUCE_GRAD 0STEP"),
        (
            2,
            "once",
            "0UNSHARD 0F0 0B0 0F1 0B1 0REDUCE_GRAD 0RESHARD 0STEP",
            "0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD 0STEP",
        ),
        (
            2,
            "microbatch",
            "0UNSHARD 0F0 0B0 0REDUCE_GRAD0 0F1 0B1 0REDUCE_GRAD1 0RESHARD 0STEP",
            "0UNSHARD 0F0 0B0 0REDUCE_GRAD0 0REDUCE_GRAD1 0RESHARD 0STEP",
        ),
        (3, "microbatch", "0F0 0B0 0F1 0B1 0STEP", "0F0 0B0 0F1 0B1 0STEP"),
    ],
)
def test_lists(zero: int, grad_reduce: GradReduce, most: str, fewer: str) -> None:
    plan = one_ministage(2, 1, zero=zero, grad_reduce=grad_reduce)
    lists = build(ScheduleSpec(plan))
    check(ScheduleSpec(plan), lists)
    assert [format_actions(own) for own in lists.values()] == [most, fewer]


def test_without_a_backward_all_microbatches_go_forward() -> None:
    plan = one_ministage(2)
    for spec in (ScheduleSpec(plan, forward_only=True), ScheduleSpec(plan, trainable=(False,))):
        lists = build(spec)
        check(spec, lists)
        assert format_actions(lists[0]) == "0UNSHARD 0F0 0F1 0RESHARD"


def test_activations_that_are_wanted_at_once_are_not_offloaded() -> None:
    plan = with_offload(one_ministage(3), OFFLOAD_KINDS)
    lists = build(ScheduleSpec(plan))
    check(ScheduleSpec(plan), lists)
    assert format_actions(lists[0]) == (
        "0UNSHARD 0F0 0LOAD_STATE 0B0 0F1 0B1 0F2 0B2 0REDUCE_GRAD 0RESHARD 0STEP 0OFFLOAD_STATE"
    )


@volume.parametrize("seed", range(150))
def test_random_plans_are_built_as_those_of_1f1b(seed: int) -> None:
    """Which without stages behind or ahead is the same."""
    rng = random.Random(seed)
    plan = random_plan(rng, max_groups=1, max_ministages_per_group=1)
    plan = with_offload(plan, rng.choice(((), ("optimizer",))))
    spec = ScheduleSpec(plan, defer_steps=rng.random() < 0.5, masters=rng.random() < 0.5)
    lists = build(spec)
    check(spec, lists)
    assert lists == build(spec, "1f1b")


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("offload", [(), ("activations",)])
def test_memory_does_not_grow_with_the_number_of_microbatches(zero: int, offload: tuple[str, ...]) -> None:
    def peak(num_microbatches: int) -> int:
        plan = with_offload(one_ministage(num_microbatches, 1, zero=zero), offload)
        walk = walk_memory(plan, 0, build(ScheduleSpec(plan))[0], {0: SIZES})
        assert walk.device["activations"] == SIZES.activation_bytes_per_row
        return walk.device_peak_bytes

    assert peak(2) == peak(3) == peak(40)
