"""DCP checkpoints come in, and pickles only if somebody says so."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from tiny import Case, adamw
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from tools import convert_checkpoint
from zorselike import HeteroPipeline, initialize
from zorselike.checkpoint.folder import find_newest
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import token_cross_entropy

pytestmark = pytest.mark.pooled

RANKS = 3
STEPS = 2
PLAN = Plan(
    4,
    (
        Group((0, 2), (Microbatch(0, 0, 1), Microbatch(2, 1, 4))),
        Group((1,), (Microbatch(1, 0, 2), Microbatch(1, 2, 4))),
    ),
    (Ministage(0, ("tok_embeddings", "layers.0")), Ministage(1, ("layers.1", "norm", "output"))),
)
CASE = Case(PLAN, 2)


def train_and_save(
    rank: int, size: int, source: Path, *, flat: bool
) -> tuple[dict[str, Tensor], list[float]]:
    """The weights that a DCP checkpoint was made of, and the losses that followed."""
    model = initialize(CASE.model(), seed=1)
    optimizer = adamw(model.named_parameters())
    saved, losses = {}, []
    for step in range(STEPS + 2):
        if step == STEPS:
            saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            dcp.save(describe(model, optimizer, flat=flat), checkpoint_id=source, no_dist=True)
        inputs, targets = CASE.batch(step)
        loss = token_cross_entropy(model(inputs), targets) / int((targets != -100).sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return saved, losses[STEPS:]


def describe(model: Any, optimizer: Any, *, flat: bool) -> dict[str, Any]:
    """`flat`: as TorchTitan has it; else as DCP's tutorial."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if not flat:
        return {"model": get_model_state_dict(model), "optim": state}
    train_state = {"step": torch.tensor(STEPS), "ntokens_seen": torch.tensor(7)}
    scheduler = {"last_epoch": STEPS}
    others = {"train_state": train_state, "lr_scheduler": scheduler}
    return {**get_model_state_dict(model), "optimizer": state, **others}


def load_and_go_on(
    rank: int, size: int, folder: Path, *, model_only: bool
) -> tuple[dict[str, Tensor], list[float], float]:
    with HeteroPipeline(
        CASE.model(), PLAN, optimizer=lambda named: torch.optim.AdamW(named, lr=3.0), skip_init=True
    ) as pipe:
        pipe.load(folder, model_only=model_only)
        state = pipe.full_state_dict()
        losses = [] if model_only else [pipe.step_global(*CASE.batch(step)).loss for step in range(2, 4)]
        rate = next(iter(pipe.optimizers.values())).param_groups[0]["lr"]
        return state, losses, rate


@pytest.mark.parametrize("flat", [True, False])
def test_a_run_goes_on_from_dcp(tmp_path: Path, flat: bool, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder, result = tmp_path / "dcp", tmp_path / "here", tmp_path / "result.json"
    ((saved, losses),) = run_ranks(lambda *own: train_and_save(*own, flat=flat), 1, source)
    command = [str(source), str(folder), "--trust-pickle", "--rows-seen", "8", "--json", str(result)]
    assert convert_checkpoint.main(command) == 0
    found, _ = find_newest(folder)
    assert found is not None and found.manifest.step == STEPS and found.manifest.rows_seen == 8
    assert json.loads(result.read_text())["path"] == str(found.path)
    assert ("lr_scheduler.last_epoch" in capsys.readouterr().out) is flat
    state, later, rate = run_ranks(lambda *own: load_and_go_on(*own, model_only=False), RANKS, folder)[0]
    assert rate == 1e-2  # The options came too.
    assert set(state) == set(saved) and all(torch.equal(state[name], saved[name]) for name in saved)
    assert later == pytest.approx(losses, rel=1e-12)


def test_the_model_alone(tmp_path: Path) -> None:
    source = tmp_path / "dcp"
    ((saved, _),) = run_ranks(lambda *own: train_and_save(*own, flat=True), 1, source)
    assert convert_checkpoint.main([str(source), str(tmp_path), "--trust-pickle", "--model-only"]) == 0
    state, *_ = run_ranks(lambda *own: load_and_go_on(*own, model_only=True), RANKS, tmp_path)[0]
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert not list(tmp_path.glob("step-*/optim"))


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_no_pickle_is_read_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    assert convert_checkpoint.main([str(tmp_path), str(tmp_path / "here")]) == 2
    said = capsys.readouterr().err
    assert "--trust-pickle" in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


@pytest.mark.parametrize("content", [None, b"no pickle", pickle.dumps({"a": 1})])
def test_what_is_no_dcp_checkpoint_is_said_in_one_line(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / ".metadata").write_bytes(content)
    assert convert_checkpoint.main([str(tmp_path), str(tmp_path / "here"), "--trust-pickle"]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path) in said and said.count("\n") == 1
    assert not (tmp_path / "here").exists()
