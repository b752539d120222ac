"""Losses that layers add train as they would in one process, whatever the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RunRanks
from tiny import Case, adamw, module_names
from torch import Tensor, nn

from zorselike import ConfigError, HeteroPipeline, add_loss, initialize
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime import auxiliary_loss
from zorselike.runtime.loss import token_cross_entropy

pytestmark = pytest.mark.pooled

NAMES = module_names(4)
ADDED_IN = ("layers.0.down", "layers.2.down", "layers.3.down")
"""Inside of layers: their own hooks are called when gradients are reduced too."""
PLAN = Plan(
    6,
    (
        Group(
            (0, 1), (Microbatch(0, 0, 1), Microbatch(1, 1, 3), Microbatch(0, 3, 6)), zero=3, recompute="layer"
        ),
        Group((2,), (Microbatch(2, 0, 4), Microbatch(2, 4, 6)), offload=("activations",)),
    ),
    tuple(
        Ministage(i % 2, tuple(own)) for i, own in enumerate((NAMES[:2], NAMES[2:4], NAMES[4:5], NAMES[5:]))
    ),
)


def balance(hidden: Tensor) -> Tensor:
    """Of each row by itself."""
    return 0.3 * hidden.tanh().mean((1, 2)).square().sum()


def train(rank: int, size: int) -> dict[str, Tensor]:
    case = Case(PLAN, 4)
    model = case.model()
    for name in ADDED_IN:
        model.get_submodule(name).register_forward_hook(lambda _, __, out: add_loss(out, balance(out)))
    with HeteroPipeline(model, PLAN, optimizer=adamw) as pipe:
        for step in range(case.num_steps):
            pipe.step_global(*case.batch(step))
            pipe.evaluate_global(*case.batch(step))
        return pipe.full_state_dict()


def train_alone(rank: int, size: int, adds: bool) -> dict[str, Tensor]:
    case = Case(PLAN, 4)
    model: nn.Module = initialize(case.model(), seed=case.seed)
    terms: list[Tensor] = []

    def keep(_: Any, __: Any, out: Tensor) -> None:
        terms.append(balance(out))

    for name in ADDED_IN:
        model.get_submodule(name).register_forward_hook(keep)
    optimizer = adamw(model.parameters())
    for step in range(case.num_steps):
        inputs, targets = case.batch(step)
        loss = token_cross_entropy(model(inputs), targets) / int((targets != -100).sum())
        if adds:
            loss = loss + sum(terms, torch.zeros(())) / len(inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        terms.clear()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def test_what_layers_add_is_trained_on(run_ranks: RunRanks) -> None:
    found = run_ranks(train, 3)[0]
    (expected,), (without,) = (run_ranks(train_alone, 1, adds) for adds in (True, False))
    assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-10) for name, tensor in expected.items())
    assert max(float((without[name] - tensor).abs().max()) for name, tensor in expected.items()) > 1e-3


def weigh_in_fp16(rank: int, size: int) -> tuple[set[float], float]:
    """What is added counts so much, and the scale of the loss."""
    case = Case(PLAN, 4)
    model, weights = case.model().float(), set()
    for name in ADDED_IN:
        model.get_submodule(name).register_forward_hook(lambda *_: weights.add(auxiliary_loss._weight))
    with HeteroPipeline(model, PLAN, optimizer=adamw, param_dtype=torch.float16) as pipe:
        scale = pipe.loss_scale
        assert scale is not None
        pipe.step_global(*case.batch(0))
        return weights - {0.0}, scale  # Shapes are found before the step.


def test_it_is_scaled_as_the_loss_is(run_ranks: RunRanks) -> None:
    for weights, scale in run_ranks(weigh_in_fp16, 3):
        assert weights == {scale / PLAN.global_batch}


def add_outside(rank: int, size: int) -> tuple[bool, str]:
    x = torch.ones(2, 3, requires_grad=True)
    add_loss(x, x.square().sum()).sum().backward()
    with pytest.raises(ConfigError) as caught:
        add_loss(x, x.sum(1))
    return x.grad is not None and torch.equal(x.grad, torch.ones(2, 3)), str(caught.value)


def test_it_is_one_number_and_nothing_elsewhere(run_ranks: RunRanks) -> None:
    ((adds_nothing, refusal),) = run_ranks(add_outside, 1)
    assert adds_nothing
    assert "of shape [2]; give one number" in refusal
