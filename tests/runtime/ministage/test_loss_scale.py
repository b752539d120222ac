"""fp16: the loss is scaled, and a step that overflows anywhere changes nothing anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import volume
from ranks import RunRanks
from tiny import Case, adamw, module_names
from torch import Tensor, nn

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan
from zorselike.runtime.ministage.sharding import local_tensor
from zorselike.runtime.ministage.updates import GROWTH_INTERVAL, INITIAL, Clip, LossScale

pytestmark = pytest.mark.pooled

DIM = 6
ROWS = 6
NUM_LAYERS = 3
NAMES = module_names(NUM_LAYERS)
Batch = tuple[Tensor, Tensor]


def over_three_ranks(zero: int, offload: Sequence[str]) -> Plan:
    """Ranks 0 and 1, then rank 2, then ranks 0 and 1 again; only rank 1 has the last row."""
    kinds = tuple(offload)
    first = Group(
        (0, 1), tuple(Microbatch(row // 4, row, row + 1) for row in range(ROWS)), zero, offload=kinds
    )
    second = Group((2,), (Microbatch(2, 0, 3), Microbatch(2, 3, 6)), zero, offload=kinds)
    return Plan(ROWS, (first, second), tuple(Ministage(i % 2, (str(i),)) for i in range(3)))


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.float() - targets).square().sum()


def perceptron() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), nn.Linear(DIM, DIM)
        )


def rows(step: int, *, spoilt: str = "") -> Batch:
    """Inputs and targets; `spoilt`: which of them overflow fp16 in the last row."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, ROWS, DIM, generator=generator)
    if spoilt == "inputs":
        inputs[-1] = 1e6  # Infinite once it is cast, and the loss is not a number.
    if spoilt == "targets":
        targets[-1] = 1e4  # The loss is finite; its scaled gradient is not.
    return inputs, targets


@dataclass
class Snapshot:
    """All that a step may change on one rank."""

    tensors: list[Tensor]
    counts: list[float]

    def equals(self, other: Snapshot) -> bool:
        pairs = zip(self.tensors, other.tensors, strict=True)
        return self.counts == other.counts and all(torch.equal(a, b) for a, b in pairs)


def snapshot(pipe: HeteroPipeline) -> Snapshot:
    tensors, counts = [], []
    with pipe.loaded():
        for ministage in pipe._assembly.ministages.values():
            tensors += [local_tensor(p.detach()).clone() for _, p in ministage.module.named_parameters()]
        for _, optimizer in sorted(pipe.optimizers.items()):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    tensors.append(local_tensor(parameter.detach()).clone())
                    state = optimizer.state[parameter]
                    counts.append(float(state.get("step", 0)))
                    tensors += [
                        local_tensor(state[key]).clone() for key in ("exp_avg", "exp_avg_sq") if key in state
                    ]
    return Snapshot(tensors, counts)


@dataclass
class Story:
    """One rank's steps: a good one, a spoilt one, a good one."""

    scales: list[float | None]
    skipped: list[bool]
    changed: list[bool]
    norms: list[float]
    gradients_left: bool


def spoil_each(rank: int, world_size: int, zero: int, offload: Sequence[str]) -> dict[str, Story]:
    """By what is spoilt."""
    max_norm = 1.0 if zero == 2 else None
    return {spoilt: spoil_the_second(zero, offload, spoilt, max_norm) for spoilt in ("inputs", "targets")}


def spoil_the_second(zero: int, offload: Sequence[str], spoilt: str, max_norm: float | None) -> Story:
    pipe = HeteroPipeline(
        perceptron(),
        over_three_ranks(zero, offload),
        optimizer=adamw,
        loss_fn=squared,
        count_fn=len,
        param_dtype=torch.float16,
        max_norm=max_norm,
    )
    story = Story([pipe.loss_scale], [], [], [], False)
    before = snapshot(pipe)
    for step, which in enumerate(("", spoilt, "")):
        result = pipe.step_global(*rows(step, spoilt=which))
        after = snapshot(pipe)
        story.scales.append(pipe.loss_scale)
        story.skipped.append(result.is_skipped)
        story.changed.append(len(before.tensors) != len(after.tensors) or not before.equals(after))
        story.norms.append(result.grad_norm)
        before = after
    story.gradients_left = any(
        parameter.grad is not None
        for ministage in pipe._assembly.ministages.values()
        for parameter in (*ministage.trained.values(), *dict(ministage.module.named_parameters()).values())
    )
    pipe.close()
    return story


@volume.parametrize(("zero", "offload"), [*product((0, 2, 3), ((), ("optimizer",), OFFLOAD_KINDS))], least=2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    zero: int, offload: Sequence[str], run_ranks: RunRanks
) -> None:
    """Weights, masters, moments and the optimizers' counts are bit-equal to those before."""
    for stories in run_ranks(spoil_each, 3, zero, offload):
        for spoilt, story in stories.items():
            assert story.scales == [INITIAL, INITIAL, INITIAL / 2, INITIAL / 2], spoilt
            assert story.skipped == [False, True, False], spoilt
            assert story.changed == [True, False, True], spoilt
            assert list(map(math.isfinite, story.norms)) == [True, False, True], spoilt
            assert not story.gradients_left, spoilt


def spoil_the_first(rank: int, world_size: int, offload: Sequence[str]) -> tuple[list[bool], bool]:
    """Skips before the optimizer has any state, then trains."""
    pipe = HeteroPipeline(
        perceptron(),
        over_three_ranks(2, offload),
        optimizer=adamw,
        loss_fn=squared,
        count_fn=len,
        param_dtype=torch.float16,
    )
    skipped = [pipe.step_global(*rows(0, spoilt="targets")).is_skipped for _ in range(3)]
    skipped += [pipe.step_global(*rows(0)).is_skipped for _ in range(2)]
    evaluated = pipe.evaluate_global(*rows(0, spoilt="inputs"))
    is_right = pipe.loss_scale == INITIAL / 8 and not evaluated.is_skipped
    pipe.close()
    return skipped, is_right


@pytest.mark.parametrize("offload", [(), OFFLOAD_KINDS])
def test_first_steps_may_be_skipped(offload: Sequence[str], run_ranks: RunRanks) -> None:
    for skipped, is_right in run_ranks(spoil_the_first, 3, offload):
        assert skipped == [True] * 3 + [False] * 2 and is_right


# -- what is unscaled ------------------------------------------------------------------------------


def sgd(named_parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named_parameters, lr=1.0)


@dataclass(frozen=True)
class Clipping:
    """What is computed in, and how its gradients are clipped."""

    dtype: torch.dtype | None = torch.float16
    max_norm: float | None = None
    clip: Clip = "global"


def step_once(
    rank: int, world_size: int, clippings: Sequence[Clipping]
) -> list[tuple[float, dict[int, float]]]:
    """Of each: the norm that is reported, and by ministage the length of the step."""
    return [step_clipped(clipping) for clipping in clippings]


def step_clipped(clipping: Clipping) -> tuple[float, dict[int, float]]:
    pipe = HeteroPipeline(
        perceptron(),
        over_three_ranks(2, ()),
        optimizer=sgd,
        loss_fn=squared,
        count_fn=len,
        param_dtype=clipping.dtype,
        max_norm=clipping.max_norm,
        clip=clipping.clip,
    )
    before = pipe.full_state_dict()
    norm = pipe.step_global(*rows(0)).grad_norm
    after = pipe.full_state_dict()
    pipe.close()
    squares = {0: 0.0, 1: 0.0, 2: 0.0}
    for name, weight in before.items():
        squares[int(name[0])] += float((after[name] - weight).double().square().sum())
    return norm, {ministage: math.sqrt(square) for ministage, square in squares.items()}


def test_norms_and_clipping_are_those_of_the_unscaled_gradient(run_ranks: RunRanks) -> None:
    by_ministage = Clipping(max_norm=0.01, clip="ministage")
    clippings = [Clipping(), Clipping(max_norm=0.01), Clipping(max_norm=1e6), by_ministage]
    (expected, _), *others = run_ranks(step_once, 3, [Clipping(None), *clippings])[0]
    assert expected > 0.5
    for clipping, (found, lengths) in zip(clippings, others, strict=True):
        assert found == pytest.approx(expected, rel=5e-3), clipping
        length = math.hypot(*lengths.values())
        if clipping is by_ministage:
            assert list(lengths.values()) == pytest.approx([0.01] * 3, rel=1e-3)
        elif clipping.max_norm is None:
            assert length == pytest.approx(found, rel=1e-5)
        else:
            assert length == pytest.approx(min(clipping.max_norm, found), rel=1e-3), clipping


def train_long(
    rank: int, world_size: int, settings: Sequence[tuple[torch.dtype | None, torch.dtype]]
) -> list[list[float]]:
    """Losses of many steps on one batch, by what is computed in and what the model is in."""
    group = Group(
        (0, 1), (Microbatch(0, 0, 2), Microbatch(1, 2, 5), Microbatch(0, 5, 6)), offload=OFFLOAD_KINDS
    )
    cuts = (NAMES[:2], NAMES[2:4], NAMES[4:])
    plan = Plan(6, (group,), tuple(Ministage(0, tuple(cut)) for cut in cuts))
    case = Case(plan, NUM_LAYERS)
    losses = []
    for dtype, built_in in settings:
        pipe = HeteroPipeline(case.model().to(built_in), plan, optimizer=adamw, param_dtype=dtype)
        losses.append([pipe.step_global(*case.batch(0)).loss for _ in range(30)])
        pipe.close()
    return losses


@pytest.mark.nightly
def test_fp16_trains_as_fp32_does(run_ranks: RunRanks) -> None:
    halves = volume.part([(torch.float16, torch.float32), (None, torch.float16)])
    settings = [(None, torch.float32), *halves]
    expected, *others = run_ranks(train_long, 2, settings)[0]
    for found in others:
        assert found[-1] < found[0] / 2
        assert found == pytest.approx(expected, rel=0.05, abs=0.02)


# -- the scale itself ------------------------------------------------------------------------------


def test_the_scale_doubles_after_many_good_steps() -> None:
    scale = LossScale()
    assert scale.value == INITIAL == 65536 and GROWTH_INTERVAL == 2000
    for _ in range(GROWTH_INTERVAL - 1):
        scale.begin()
        scale.update(overflowed=False)
        assert scale.value == INITIAL
    scale.begin()
    scale.update(overflowed=False)
    assert scale.value == 2 * INITIAL and scale.value_of_step == INITIAL
    scale.begin()
    assert scale.value_of_step == 2 * INITIAL


def test_an_overflow_halves_it_and_starts_the_count_again() -> None:
    scale = LossScale()
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(overflowed=False)
    scale.update(overflowed=True)
    assert scale.value == INITIAL / 2
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(overflowed=False)
    assert scale.value == INITIAL / 2
    scale.update(overflowed=False)
    assert scale.value == INITIAL
    for _ in range(3):
        scale.update(overflowed=True)
    assert scale.value == INITIAL / 8
