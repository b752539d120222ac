"""Optimizers and learning rates."""

from __future__ import annotations

import logging
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import RunRanks
from torch import nn

from zorselike.models import build_model
from zorselike.train.config.config import LRScheduler, Optimizer
from zorselike.train.optimizer import (
    WarmupStableDecay,
    build_lr_scheduler_factory,
    build_optimizer_factory,
    group_by_decay,
    is_decayed,
    log_schedule,
)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_norms_and_biases_are_not_decayed(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, "debug")
    for fqn, parameter in model.named_parameters():
        expected = not (fqn.endswith("bias") or "norm" in fqn)
        assert is_decayed(fqn, parameter) == expected, fqn


def test_groups_keep_names_and_leave_out_what_is_empty() -> None:
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    both = group_by_decay([("a.weight", matrix), ("a.bias", vector)], weight_decay=0.3)
    assert [(group["params"][0][0], group["weight_decay"]) for group in both] == [
        ("a.weight", 0.3),
        ("a.bias", 0.0),
    ]
    assert len(group_by_decay([("a.bias", vector)], weight_decay=0.3)) == 1


def step_all(rank: int, world_size: int) -> list[list[float]]:
    results = []
    for implementation in ("for-loop", "foreach", "fused"):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        config = Optimizer(lr=0.1, weight_decay=0.5, implementation=implementation)  # type: ignore[arg-type]
        optimizer = build_optimizer_factory(config)(list(layer.named_parameters()))
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        results.append([*layer.weight.flatten().tolist(), *layer.bias.tolist()])
    return results


def test_implementations_agree(run_ranks: RunRanks) -> None:
    ((loop, foreach, fused),) = run_ranks(step_all, 1)
    assert foreach == pytest.approx(loop, abs=1e-6)
    assert fused == pytest.approx(loop, abs=1e-6)


def test_fused_falls_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))  # There is no fused kernel.
    with caplog.at_level("INFO", logger="zorselike"):
        optimizer = build_optimizer_factory(Optimizer())([("a.weight", parameter)])
    assert optimizer.defaults["foreach"]
    assert "has no fused kernels" in caplog.text


def test_warmup_stable_decay() -> None:
    config = LRScheduler(warmup_steps=2, decay_ratio=0.4)
    factor = WarmupStableDecay.of(config, steps=10)
    # The decay's end would fall on an eleventh step, so that the last one still learns.
    expected = [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert [factor(step) for step in range(10)] == pytest.approx(expected)
    assert factor(10) == factor(99) == 0


def test_cosine_from_the_end_of_the_warmup() -> None:
    config = LRScheduler(warmup_steps=1, decay_type="cosine", min_lr_factor=0.1)
    factor = WarmupStableDecay.of(config, steps=5)
    progress = [0, 0, 1 / 4, 2 / 4, 3 / 4]
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * p)) for p in progress]
    assert [factor(step) for step in range(5)] == pytest.approx(expected)


def test_a_schedule_that_ends_before_the_run_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Its steps after that would have no learning rate without a word."""
    config = LRScheduler(warmup_steps=1, total_steps=5)
    with caplog.at_level(logging.INFO, "zorselike"):
        log_schedule(config, steps=5)
        assert not caplog.messages
        log_schedule(config, steps=10)
    (said,) = caplog.messages
    assert "total_steps = 5 ends before [training] steps = 10: every step after it has 0 times" in said


def test_total_steps_decouples_the_schedule() -> None:
    config = LRScheduler(warmup_steps=2, decay_type="sqrt", total_steps=100)
    assert WarmupStableDecay.of(config, steps=10) == WarmupStableDecay.of(config, steps=100)


@given(
    st.integers(0, 30),
    st.integers(1, 40),
    st.none() | st.floats(0, 1),
    st.sampled_from(["linear", "sqrt", "cosine"]),
    st.floats(0, 1),
)
def test_any_schedule_rises_then_falls(
    warmup: int, steps: int, ratio: float | None, decay_type: str, floor: float
) -> None:
    config = LRScheduler(
        warmup_steps=warmup,
        decay_ratio=ratio,
        decay_type=decay_type,  # type: ignore[arg-type]
        min_lr_factor=floor,
    )
    factor = WarmupStableDecay.of(config, steps=steps)
    values = [factor(step) for step in range(steps)]
    peak = values.index(max(values))
    assert all(0 < value <= 1 for value in values)
    assert all(a <= b for a, b in pairwise(values[: peak + 1]))
    assert all(a >= b >= floor for a, b in pairwise(values[peak:]))


def test_schedulers_set_the_rate() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = build_lr_scheduler_factory(LRScheduler(warmup_steps=4), steps=8)(optimizer)
    rates = [scheduler.get_last_lr()[0]]
    optimizer.step()
    scheduler.step()
    assert [*rates, scheduler.get_last_lr()[0]] == [0.5, 1.0]
