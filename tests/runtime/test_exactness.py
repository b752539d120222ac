"""Whatever the plan, training equals a single process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import volume
from cases import CASES, MAX_RANKS
from ranks import RunRanks
from tiny import Case, assert_same, train_all_planned, train_all_single, with_groups

from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.schedule import ScheduleSpec, build

pytestmark = pytest.mark.pooled


def has_unequal_zero3(plan: Plan) -> bool:
    return any(
        group.zero == 3 and len({len(own) for own in group.microbatches_by_rank.values()}) > 1
        for group in plan.groups
    )


def has_idle_rank(plan: Plan) -> bool:
    return any(not own for group in plan.groups for own in group.microbatches_by_rank.values())


def has_unequal_counts(plan: Plan) -> bool:
    """Between groups, or between ranks of one."""
    return len({len(plan.microbatches_of_rank(rank)) for rank in plan.group_of_rank}) > 1


def has_group(plan: Plan, zero: int, grad_reduce: str) -> bool:
    return any((group.zero, group.grad_reduce) == (zero, grad_reduce) for group in plan.groups)


def ties_across_zero(case: Case) -> bool:
    ends = (case.plan.group_of(0), case.plan.group_of(case.plan.num_ministages - 1))
    return case.tied and ends[0].zero != ends[1].zero


def test_the_cases_cover_what_they_should() -> None:
    assert len(CASES) >= 60
    assert sum(has_unequal_zero3(case.plan) for case in CASES) >= 10
    many = [
        c for c in CASES if any(len(c.plan.ministages_of_group(g)) > 1 for g in range(len(c.plan.groups)))
    ]
    assert len(many) >= 10
    assert sum(has_idle_rank(case.plan) for case in CASES) >= 10
    assert sum(map(ties_across_zero, CASES)) >= 10
    assert sum(case.max_norm is not None for case in CASES) >= 10
    assert sum(bool(case.evaluate_before) for case in CASES) >= 10
    assert {len(case.plan.groups) for case in CASES} == {1, 2, 3, 4}
    assert {case.plan.num_ranks for case in CASES} == set(range(1, MAX_RANKS + 1))
    zeros = {(group.zero, group.grad_reduce) for case in CASES for group in case.plan.groups}
    assert zeros >= {(0, "once"), (1, "once"), (2, "once"), (2, "microbatch"), (3, "once")}


def test_the_cases_cover_bounds_on_microbatches_in_flight() -> None:
    bounded = [case.plan for case in CASES if case.plan.bounds_in_flight]
    assert len(bounded) >= 10
    several = [plan for plan in bounded if len(plan.groups) > 1]
    assert len(several) >= 10
    assert sum(build(ScheduleSpec(plan)) != build(ScheduleSpec(unbounded(plan))) for plan in several) >= 8
    assert sum(map(has_unequal_counts, several)) >= 5
    assert sum(has_group(plan, 3, "once") or has_group(plan, 3, "microbatch") for plan in several) >= 3
    assert sum(has_unequal_zero3(plan) for plan in several) >= 2
    assert sum(has_group(plan, 2, "microbatch") for plan in several) >= 2
    assert sum(plan.num_ministages > len(plan.groups) for plan in several) >= 5


def unbounded(plan: Plan) -> Plan:
    return with_groups(plan, lambda group: replace(group, max_in_flight=None))


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", range(1, MAX_RANKS + 1))
def test_training_equals_a_single_process(num_ranks: int, run_ranks: RunRanks) -> None:
    cases = volume.part([case for case in CASES if case.plan.num_ranks == num_ranks])
    (expected,) = run_ranks(train_all_single, 1, cases, timeout=300)
    found = run_ranks(train_all_planned, num_ranks, cases, timeout=300)
    for case, ours, theirs in zip(cases, found[0], expected, strict=True):
        assert_same(ours, theirs, case)
    for other in found[1:]:
        for ours, here in zip(found[0], other, strict=True):
            assert (here.losses, here.norms, here.evaluations) == (ours.losses, ours.norms, ours.evaluations)
            assert here.state == {}


def test_the_same_plan_twice_is_bit_equal(run_ranks: RunRanks) -> None:
    case = next(case for case in CASES if case.plan.num_ranks == 3 and len(case.plan.groups) > 1)
    first, second = (run_ranks(train_all_planned, 3, [case])[0][0] for _ in range(2))
    assert first.losses == second.losses
    assert first.norms == second.norms
    for name, tensor in first.state.items():
        assert torch.equal(tensor, second.state[name])


def adapter_case(zero: int, kind: str) -> Case:
    """Rank 2 alone, then ranks 0 and 1, then rank 2 again; most of the model does not train."""
    num_layers = 4
    first = Group((2,), (Microbatch(2, 0, 2), Microbatch(2, 2, 5)), zero=zero)
    second = Group((0, 1), (Microbatch(0, 0, 1), Microbatch(1, 3, 5), Microbatch(0, 1, 3)), zero=zero)
    cuts = (("tok_embeddings", "layers.0"), ("layers.1", "layers.2"), ("layers.3", "norm"), ("output",))
    plan = Plan(5, (first, second), tuple(Ministage(i % 2, names) for i, names in enumerate(cuts)))
    not_adapters = [f"layers.{i}.{name}" for i in range(num_layers) for name in ("norm", "down")]
    frozen = {
        # As LoRA has it: a small part of every layer, nothing else.
        "adapters": ("tok_embeddings", "norm", "output", *not_adapters),
        # The second ministage hands gradients on and keeps none; the first needs them.
        "middle": ("layers.1", "layers.2"),
        # Nobody below the last two ministages runs a backward.
        "lower": ("tok_embeddings", "layers.0", "layers.1", "layers.2"),
        "head only": ("tok_embeddings", "layers.", "norm"),
    }[kind]
    return Case(plan, num_layers, seed=zero, max_norm=0.1, frozen=frozen, num_steps=2)


@pytest.mark.nightly
def test_training_little_of_a_frozen_model(run_ranks: RunRanks) -> None:
    kinds = ("adapters", "middle", "lower", "head only")
    cases = volume.part([adapter_case(zero, kind) for zero in range(4) for kind in kinds], least=5)
    (expected,) = run_ranks(train_all_single, 1, cases, timeout=300)
    found = run_ranks(train_all_planned, 3, cases, timeout=300)
    for case, ours, theirs in zip(cases, found[0], expected, strict=True):
        assert_same(ours, theirs, case)
