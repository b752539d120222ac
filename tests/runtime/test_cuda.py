"""What needs a GPU: the same numbers as on the CPU, over the transports that GPUs use."""

from __future__ import annotations

import pytest
import torch
from ranks import RunRanks
from tiny import Case, Outcome, adamw, assert_same, module_names, train_all_single

from zorselike import HeteroPipeline
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

NAMES = module_names(4)
CUTS = (NAMES[:2], NAMES[2:3], NAMES[3:5], NAMES[5:])

pytestmark = pytest.mark.gpu


def need_gpus(count: int) -> None:
    """Skips here, without touching CUDA in the parent of the ranks more than counting needs."""
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} CUDA devices, this machine has {found}")


def one_group(num_ranks: int, zero: int) -> Plan:
    """All ranks in one group with four ministages; rank 0 has most rows."""
    rows = (Microbatch(0, 0, 2), Microbatch(num_ranks - 1, 2, 3), Microbatch(0, 3, 6))
    ministages = tuple(Ministage(0, tuple(names)) for names in CUTS)
    return Plan(6, (Group(tuple(range(num_ranks)), rows, zero=zero),), ministages)


def two_groups(num_ranks: int) -> Plan:
    """Rank 0, then the others; visited twice, so that an edge of the cycle goes over Gloo."""
    others = tuple(range(1, num_ranks))
    rows = tuple(
        Microbatch(rank, i * 6 // len(others), (i + 1) * 6 // len(others)) for i, rank in enumerate(others)
    )
    groups = (Group((0,), (Microbatch(0, 0, 4), Microbatch(0, 4, 6))), Group(others, rows))
    return Plan(6, groups, tuple(Ministage(i % 2, tuple(names)) for i, names in enumerate(CUTS)))


def train_on_gpus(rank: int, world_size: int, case: Case) -> Outcome:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    pipe = HeteroPipeline(case.model(), case.plan, optimizer=adamw, max_norm=case.max_norm, device=device)
    results = [pipe.step_global(*case.batch(step)) for step in range(case.num_steps)]
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    state = pipe.full_state_dict()
    pipe.close()
    return Outcome(tuple(losses), tuple(norms), (), state)


@pytest.mark.parametrize("zero", range(4))
def test_one_gpu_equals_the_cpu(zero: int, run_ranks: RunRanks) -> None:
    need_gpus(1)
    check(Case(one_group(1, zero), 4, max_norm=0.1), run_ranks)


@pytest.mark.parametrize("zero", range(4))
def test_a_group_over_nccl_equals_the_cpu(zero: int, run_ranks: RunRanks) -> None:
    need_gpus(2)
    check(Case(one_group(2, zero), 4, max_norm=0.1), run_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_groups_over_nccl_and_gloo_equal_the_cpu(num_ranks: int, run_ranks: RunRanks) -> None:
    need_gpus(num_ranks)
    check(Case(two_groups(num_ranks), 4, tied=True), run_ranks)


def check(case: Case, run_ranks: RunRanks) -> None:
    ((expected,),) = run_ranks(train_all_single, 1, [case])
    found = run_ranks(train_on_gpus, case.plan.num_ranks, case, timeout=180)[0]
    assert_same(found, expected, case)
