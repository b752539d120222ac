"""A plan with a single ministage: each microbatch goes forward and at once backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
import volume
from ranks import RunRanks
from tiny import Case, assert_same, module_names, train_all_planned, train_all_single, train_planned
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zorselike.plan.plan import OFFLOAD_KINDS, GradReduce, Group, Microbatch, Ministage, Plan

pytestmark = pytest.mark.pooled

NUM_LAYERS = 3
COUNTS = ((3,), (3, 1), (1, 3, 0))
"""Microbatches of each rank, by the number of ranks."""
WAYS: tuple[tuple[int, GradReduce], ...] = (
    (0, "once"),
    (1, "once"),
    (2, "once"),
    (2, "microbatch"),
    (3, "microbatch"),
)


def one_ministage(counts: tuple[int, ...], zero: int, grad_reduce: GradReduce) -> Plan:
    """Microbatches of one row and of two in turn, the ranks' mixed."""
    turns = [(rank, m) for m in range(max(counts)) for rank in range(len(counts)) if m < counts[rank]]
    microbatches = []
    start = 0
    for turn, (rank, _) in enumerate(turns):
        stop = start + 1 + turn % 2
        microbatches.append(Microbatch(rank, start, stop))
        start = stop
    group = Group(tuple(range(len(counts))), tuple(microbatches), zero=zero, grad_reduce=grad_reduce)
    return Plan(start, (group,), (Ministage(0, tuple(module_names(NUM_LAYERS))),)).validate()


def with_settings(plan: Plan, recompute: bool, offload: tuple[str, ...]) -> Plan:
    group = replace(plan.groups[0], recompute="layer" if recompute else "none", offload=offload)
    return replace(plan, groups=(group,))


def make_cases(counts: tuple[int, ...]) -> list[Case]:
    """Every way of sharding and reducing: with all updated at once and behind the norm, part of the model
    frozen, an evaluation between; recomputed and offloaded."""
    cases = []
    for seed, (zero, grad_reduce) in enumerate(WAYS):
        plain = one_ministage(counts, zero, grad_reduce)
        for recompute, offload in ((False, ()), (True, ()), (False, ("activations",)), (True, OFFLOAD_KINDS)):
            plan = with_settings(plain, recompute, offload)
            cases += [
                Case(plan, NUM_LAYERS, seed, evaluate_before=(1,)),
                Case(plan, NUM_LAYERS, seed, max_norm=0.1, tied=zero < 3, num_steps=2),
            ]
        cases.append(Case(plain, NUM_LAYERS, seed, frozen=("tok_embeddings", "layers.0", "layers.2.up")))
    return cases


@pytest.mark.nightly
@pytest.mark.parametrize("counts", COUNTS)
def test_training_equals_a_single_process(counts: tuple[int, ...], run_ranks: RunRanks) -> None:
    cases = volume.part(make_cases(counts))
    (expected,) = run_ranks(train_all_single, 1, cases, timeout=300)
    found = run_ranks(train_all_planned, len(counts), cases, timeout=300)
    for case, ours, theirs in zip(cases, found[0], expected, strict=True):
        assert_same(ours, theirs, case)


def count_kept(rank: int, world_size: int, cases: Sequence[Case]) -> list[int]:
    """Of each case: the most activations that are alive at once in its last step, one a layer."""
    tanh = torch.tanh
    outputs: list[StorageWeakRef] = []
    alive: list[int] = []

    def watched(x: Tensor) -> Tensor:
        output = tanh(x)
        outputs.append(StorageWeakRef(output.untyped_storage()))
        alive.append(sum(not own.expired() for own in outputs))
        return output

    found = []
    with mock.patch.object(torch, "tanh", watched):
        for case in cases:
            train_planned(case)
            num_forwards = NUM_LAYERS * len(case.plan.microbatches_of_rank(rank))
            found.append(max(alive[-num_forwards:]))
    return found


def test_activations_of_one_microbatch_are_kept(run_ranks: RunRanks) -> None:
    """Of two ministages those of all in the first, and in the last of one."""
    plans = [one_ministage((4,), zero, grad_reduce) for zero, grad_reduce in WAYS]
    plans.append(with_settings(plans[0], False, ("activations",)))
    names = module_names(NUM_LAYERS)
    cut = (Ministage(0, tuple(names[:2])), Ministage(0, tuple(names[2:])))
    cases = [Case(plan, NUM_LAYERS) for plan in (*plans, replace(plans[0], ministages=cut))]
    (found,) = run_ranks(count_kept, 1, cases)
    assert found == [NUM_LAYERS] * len(plans) + [4 * 1 + (NUM_LAYERS - 1)]
