"""torch.distributed.checkpoint reads what pipelines saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import RunRanks
from saved import contents
from tiny import Case, adamw
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from zorselike import HeteroPipeline
from zorselike.checkpoint.layout import entry_name
from zorselike.checkpoint.read import read_manifest
from zorselike.plan.holdings import VALUE
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

pytestmark = pytest.mark.pooled

RANKS = 4
PLAN = Plan(
    4,
    (
        Group((0, 2, 3), (Microbatch(0, 0, 1), Microbatch(2, 1, 3), Microbatch(3, 3, 4))),
        Group((1,), (Microbatch(1, 0, 2), Microbatch(1, 2, 4))),
    ),
    (
        Ministage(0, ("tok_embeddings",)),
        Ministage(1, ("layers.0",)),
        Ministage(0, ("layers.1", "norm")),
        Ministage(1, ("output",)),
    ),
)


def train_and_save(rank: int, size: int, zero: int, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    groups = tuple(replace(group, zero=zero) for group in PLAN.groups)
    case = Case(replace(PLAN, groups=groups), 2)
    with HeteroPipeline(case.model(), case.plan, optimizer=adamw) as pipe:
        for step in range(2):
            pipe.step_global(*case.batch(step))
        save = pipe.save(folder)
        assert save is not None and save.path is not None
        return save.path, pipe.full_state_dict()


@pytest.mark.parametrize("zero", [0, 2])
def test_torch_reads_slices_of_uneven_groups(run_ranks: RunRanks, tmp_path: Path, zero: int) -> None:
    path, weights = run_ranks(train_and_save, RANKS, zero, tmp_path)[0]
    tensors, _ = contents(tmp_path)
    shapes = {name: tensor.shape for name, tensor in read_manifest(path).tensors.items()}
    for part in ("model", "optim"):
        keys = [key for key in tensors if (key[1] == VALUE) is (part == "model")]
        state = {entry_name(*key): torch.zeros(shapes[key[0]], dtype=torch.float64) for key in keys}
        assert len(state) == (1 if part == "model" else 2) * len(weights)
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path / part)), no_dist=True)
        for name, kind in keys:
            found = state[entry_name(name, kind)]
            assert found.numpy().tobytes() == tensors[name, kind]
            assert kind != VALUE or torch.equal(found, weights[name])
            assert found.count_nonzero()
