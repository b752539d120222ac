"""Weights of whole tensors, as others lay them out, are read by every rank for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RunRanks
from safetensors.torch import load_file, save_file
from tiny import Case, adamw

from zorselike import HeteroPipeline
from zorselike.checkpoint.export import export
from zorselike.errors import CheckpointError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

pytestmark = pytest.mark.pooled

RANKS = 3
BEFORE = Plan(
    4,
    (Group((0, 2), (Microbatch(0, 0, 1), Microbatch(2, 1, 4))), Group((1,), (Microbatch(1, 0, 4),))),
    (Ministage(0, ("tok_embeddings", "layers.0")), Ministage(1, ("layers.1", "norm", "output"))),
)
AFTER = Plan(
    4,
    (Group((1,), (Microbatch(1, 0, 4),)), Group((2, 0), (Microbatch(0, 0, 3), Microbatch(2, 3, 4)), zero=3)),
    (Ministage(0, ("tok_embeddings",)), Ministage(1, ("layers.0", "layers.1", "norm", "output"))),
)


def train(rank: int, size: int, folder: Path) -> float:
    case = Case(BEFORE, 2, tied=True)
    with HeteroPipeline(case.model(), BEFORE, optimizer=adamw) as pipe:
        pipe.step_global(*case.batch(0))
        path = pipe.save(folder / "run", model_only=True).wait()  # type: ignore[union-attr]
        if rank == 0:
            export(path, folder / "one", aliases=True)
            export(path, folder / "several", max_shard_bytes=500)
        return pipe.evaluate_global(*case.batch(1)).loss


def load(rank: int, size: int, folder: Path) -> list[Any]:
    case = Case(AFTER, 2, tied=True)
    found: list[Any] = []
    with HeteroPipeline(case.model(), AFTER, optimizer=adamw) as pipe:
        for name in ("one", "several"):
            pipe.load_pretrained(folder / name)
            found.append(pipe.evaluate_global(*case.batch(1)).loss)
            found.append(pipe.num_steps)
        for name in ("cut", "integers", "pickle"):
            with pytest.raises(CheckpointError) as caught:
                pipe.load_pretrained(folder / name)
            found.append(str(caught.value))
    return found


def test_every_rank_reads_its_part(run_ranks: RunRanks, tmp_path: Path) -> None:
    expected = run_ranks(train, RANKS, tmp_path)[0]
    assert "output.weight" in load_file(tmp_path / "one" / "model.safetensors")
    assert len([*(tmp_path / "several").glob("model-0*.safetensors")]) > 2
    (tmp_path / "several" / "consolidated.safetensors").write_bytes(b"the same in another form")
    (tmp_path / "cut").mkdir()
    whole = load_file(tmp_path / "one" / "model.safetensors")
    save_file(
        {name: own for name, own in whole.items() if name != "norm.weight"},
        tmp_path / "cut" / "a.safetensors",
    )
    (tmp_path / "integers").mkdir()
    integers = {"norm.weight": (8 * whole["norm.weight"]).to(torch.int8)}
    save_file({**whole, **integers}, tmp_path / "integers" / "a.safetensors")
    (tmp_path / "pickle").mkdir()
    torch.save({}, tmp_path / "pickle" / "pytorch_model.bin")
    for one, steps, several, _, cut, quantized, pickle in run_ranks(load, RANKS, tmp_path):
        assert one == several == pytest.approx(expected, rel=1e-12)
        assert steps == 0
        assert "cut: is of another model: it holds no norm.weight" in cut
        assert "norm.weight has integers there (I8, as in quantized models)" in quantized
        assert "pytorch_model.bin is a pickle" in pickle
