"""Validation computes the loss of all of its rows, and training does not notice."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RunRanks
from tiny import DIM, SEQUENCE, VOCABULARY, adamw, train_single  # noqa: F401
from torch import nn

from zorselike import Group, HeteroPipeline, Microbatch, Ministage, Plan, initialize
from zorselike.runtime.loss import token_cross_entropy
from zorselike.train.config.config import Config, Training
from zorselike.train.config.config import Validation as Settings
from zorselike.train.data.corpus import Corpus
from zorselike.train.data.sources import open_rows
from zorselike.train.validation import Validation, open_validation_rows

GLOBAL_BATCH = 5
PLAN = Plan(
    GLOBAL_BATCH,
    (
        Group((0, 1), (Microbatch(0, 0, 2), Microbatch(0, 2, 3), Microbatch(1, 3, 5))),
        Group((2,), (Microbatch(2, 0, 4), Microbatch(2, 4, 5))),
    ),
    (Ministage(0, ("0", "1")), Ministage(1, ("2", "3")), Ministage(0, ("4",)), Ministage(1, ("5",))),
)


def build() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(
            nn.Embedding(VOCABULARY, DIM),
            nn.Dropout(0.3),
            nn.Linear(DIM, DIM),
            nn.Dropout(0.3),
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, VOCABULARY),
        ).double()


def make_corpus(folder: Path, num_rows: int) -> Corpus:
    path = folder / "held_out.bin"
    tokens = np.random.default_rng(3).integers(VOCABULARY, size=num_rows * SEQUENCE + 1)
    tokens.astype(np.uint16).tofile(path)
    return Corpus([path], dtype="uint16", seq_len=SEQUENCE, vocab_size=VOCABULARY, source="held out")


def train(pipe: HeteroPipeline, validation: Validation | None) -> list[float]:
    losses = []
    for step in range(1, 4):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randint(VOCABULARY, (2, GLOBAL_BATCH, SEQUENCE), generator=generator)
        losses.append(pipe.step_global(inputs, targets).loss)
        if validation is not None and validation.is_due(step):
            validation.run(step)
    return losses


def validate(rank: int, world_size: int, corpus: Corpus) -> dict[str, Any]:
    found: dict[str, Any] = {}
    settings = {"all": Settings(True, freq=2), "one": Settings(True, freq=2, steps=1)}
    for name, setting in settings.items():
        told: dict[int, tuple[float, int]] = {}
        metrics: Any = SimpleNamespace(
            excluding=nullcontext,
            log_validation=lambda step, loss, num_batches, seconds, told=told: told.update(
                {step: (loss, num_batches)}
            ),
        )
        vote: Any = SimpleNamespace(open=lambda: None, close=lambda: 0)
        config = Config(training=Training(steps=3), validation=setting)
        with HeteroPipeline(build(), PLAN, optimizer=adamw, seed=1) as pipe:
            validation = Validation(config, corpus, pipe, metrics=metrics, vote=vote)
            before = validation.run(0)
            found[name] = train(pipe, validation), told, torch.get_rng_state().tolist()
            vote.close = lambda: 15
            assert math.isnan(validation.run(4)) and 4 not in told and validation.stopped_by == 15
            found[f"{name} at first"] = before
    with HeteroPipeline(build(), PLAN, optimizer=adamw, seed=1) as pipe:
        found["none"] = train(pipe, None), {}, torch.get_rng_state().tolist()
    return found


def evaluate_alone(rank: int, world_size: int, corpus: Corpus, num_rows: int) -> float:
    """The mean loss over the first rows, in one process."""
    model = initialize(build(), seed=1).eval()
    rows = [corpus.read_row(row) for row in range(num_rows)]
    inputs, targets = (torch.from_numpy(np.stack([row[side] for row in rows])) for side in (0, 1))
    with torch.no_grad():
        return float(token_cross_entropy(model(inputs), targets)) / (num_rows * SEQUENCE)


def test_validation_is_exact_and_training_does_not_notice(run_ranks: RunRanks, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, 2 * GLOBAL_BATCH + 3)
    for found in run_ranks(validate, 3, corpus):
        trained, _, random = found["none"]
        for name, num_batches in (("all", 2), ("one", 1)):
            losses, told, random_then = found[name]
            assert losses == trained
            assert random_then == random
            assert {step: number for step, (_, number) in told.items()} == dict.fromkeys(
                (0, 2, 3), num_batches
            )
            (expected,) = run_ranks(evaluate_alone, 1, corpus, num_batches * GLOBAL_BATCH)
            assert math.isclose(found[f"{name} at first"], expected, rel_tol=1e-12)
            assert told[0][0] == found[f"{name} at first"] != told[2][0]


def test_validating_on_the_training_data_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(tmp_path, GLOBAL_BATCH)
    training = Training(dataset_path=str(tmp_path / "held_out.bin"), seq_len=SEQUENCE)
    settings = Settings(True, dataset_path=training.dataset_path)
    config = Config(training=training, validation=settings)
    monkeypatch.setattr(logging.getLogger("zorselike"), "propagate", True)
    for rank in (0, 1):
        world: Any = SimpleNamespace(rank=rank, gather=lambda value: [value])
        found = open_validation_rows(
            config,
            corpus,
            partial(open_rows, config, vocab_size=VOCABULARY),
            global_batch=GLOBAL_BATCH,
            world=world,
        )
        assert found is not None and found.fingerprint() == corpus.fingerprint()
    (record,) = caplog.records
    assert "the validation data are the training data" in record.getMessage()


def test_a_long_validation_says_how_long_it_will_take(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was logged for minutes."""
    validation = object.__new__(Validation)
    validation._num_batches = 100
    with caplog.at_level(logging.INFO, logger="zorselike"):
        validation._say_how_long(5, first_s=0.1)
        validation._say_how_long(6, first_s=1.5)
    assert [record.getMessage() for record in caplog.records] == [
        "validation after step 6: 100 batches, about 150 s"
    ]
