"""What every process must have been given alike."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks
from torch import nn

from zorselike.errors import ConfigError, PlanError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.comm.agreement import check_same

pytestmark = pytest.mark.pooled

PLAN = Plan(
    global_batch=3,
    groups=(Group(ranks=(0, 1, 2), zero=2, microbatches=tuple(Microbatch(r, r, r + 1) for r in range(3))),),
    ministages=(Ministage(group=0, modules=("0", "1")),),
)


def ask(rank: int, world_size: int, differs: str) -> str:
    """What this rank hears where rank 1 was given something else."""
    is_other = rank == 1
    plan = replace(PLAN, sequence_length=8) if is_other and differs == "plan" else PLAN
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    if differs == "meta" or (is_other and differs == "device"):
        model.to("meta")
    elif is_other and differs == "weights":
        with torch.no_grad():
            model[1].bias[1] += 1e-3
    elif is_other and differs == "frozen":
        model[0].requires_grad_(False)
    settings = {"max_norm": 0.5, "seed": 3 + (is_other and differs == "seed")}
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as make:
        try:
            check_same(plan, model, settings)
            heard = ""
        except (PlanError, ConfigError) as error:
            heard = f"{type(error).__name__}: {error}"
    assert make.call_count == 1 and len(dist.distributed_c10d._world.pg_map) == 1
    return heard


@pytest.mark.parametrize(
    ("differs", "error"),
    [
        ("plan", f"PlanError: process 1 runs plan {replace(PLAN, sequence_length=8).fingerprint}, process 0"),
        ("weights", "ConfigError: ranks were given different weights for 1.bias; seed every rank alike"),
        ("seed", "ConfigError: process 1 was given seed=4, process 0 seed=3; give all ranks the same"),
        (
            "frozen",
            "ConfigError: the model of process 1 has other parameters than that of process 0, or others",
        ),
        ("device", "ConfigError: the model has weights on some ranks and is on the meta device on others"),
    ],
)
def test_every_rank_hears_the_same(differs: str, error: str, run_ranks: RunRanks) -> None:
    first, *others = run_ranks(ask, 3, differs)
    assert first.startswith(error), first
    assert others == [first] * 2


@pytest.mark.parametrize("differs", ["nothing", "meta"])
def test_what_is_alike_passes(differs: str, run_ranks: RunRanks) -> None:
    assert run_ranks(ask, 3, differs) == [""] * 3
