"""Causal LMs of `transformers` train over unequal ranks as they do alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hf_families
import pytest
import volume
from hf_families import FAMILIES, PADS_LEFT, documents, exact_norms, make_model, masks, tokens
from ranks import RunRanks
from tiny import adamw
from torch import Tensor

from zorselike import HeteroPipeline, list_modules
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import token_cross_entropy

ROWS = 7
NUM_STEPS = 3


def two_groups(names: Sequence[str]) -> Plan:
    """Three ranks with 2, 1 and 1 microbatches and ZeRO 3 that recompute, and one that keeps all it can on
    the host; four ministages, in turn."""
    first = names.index(next(name for name in names if name.endswith(".0")))
    microbatches = tuple(Microbatch(*m) for m in ((0, 0, 2), (2, 2, 3), (0, 3, 4), (1, 4, 7)))
    group = Group((2, 0, 1), microbatches, zero=3, recompute="layer")
    other = Group(
        (3,), (Microbatch(3, 0, 3), Microbatch(3, 3, 7)), offload=("params", "optimizer", "activations")
    )
    cuts = (
        names[: first + 1],
        names[first + 1 : first + 3],
        names[first + 3 : first + 4],
        names[first + 4 :],
    )
    return Plan(ROWS, (group, other), tuple(Ministage(i % 2, tuple(own)) for i, own in enumerate(cuts)))


def three_groups(names: Sequence[str]) -> Plan:
    """Embeddings alone, then layers, then the norm alone, then the head; a rank without rows."""
    first = names.index(next(name for name in names if name.endswith(".0")))
    last = first + hf_families.NUM_LAYERS
    groups = (
        Group((1, 3), (Microbatch(1, 0, 4), Microbatch(1, 4, 7)), zero=2),
        Group((0,), (Microbatch(0, 0, 1), Microbatch(0, 1, 7)), zero=1, recompute="layer"),
        Group((2,), (Microbatch(2, 0, 7),), zero=0, offload=("optimizer",)),
    )
    cuts = (names[:first], names[first : first + 1], names[first + 1 : last], names[last:-1], names[-1:])
    return Plan(ROWS, groups, tuple(Ministage(i % 3, tuple(own)) for i, own in enumerate(cuts)))


PLANS = {"two groups": two_groups, "three groups": three_groups}


@dataclass(frozen=True)
class Case:
    family: str
    plan: str

    def batch(self, step: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The arguments change from step to step: masks on both sides, nothing, packed documents."""
        inputs = tokens(ROWS, seed=step)
        targets = inputs.roll(-1, 1).clone()
        targets[:, -1] = -100
        kwargs = {}
        if step == 0:
            kwargs["attention_mask"] = masks(ROWS, left=self.family in PADS_LEFT)
            targets[kwargs["attention_mask"] == 0] = -100
        elif step == 2:
            kwargs["position_ids"] = documents(ROWS)
        return inputs, targets, kwargs


CASES = [Case(family, plan) for plan in PLANS for family in FAMILIES]


def train_alone(
    rank: int, world_size: int, cases: Sequence[Case]
) -> list[tuple[list[float], dict[str, Tensor]]]:
    outcomes = []
    for case in cases:
        with exact_norms(case.family):
            model = make_model(case.family)
            optimizer, losses = adamw(list(model.parameters())), []
            for step in range(NUM_STEPS):
                inputs, targets, kwargs = case.batch(step)
                logits = model(inputs, use_cache=False, **kwargs).logits
                loss = token_cross_entropy(logits, targets) / (targets != -100).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        outcomes.append((losses, {name: t.detach().clone() for name, t in model.state_dict().items()}))
    return outcomes


def train_planned(rank: int, world_size: int, cases: Sequence[Case]) -> list[tuple[list[float], Any]]:
    outcomes = []
    for case in cases:
        with exact_norms(case.family):
            model = make_model(case.family)
            plan = PLANS[case.plan](list_modules(model))
            with HeteroPipeline(model, plan, optimizer=adamw) as pipe:
                losses = []
                for step in range(NUM_STEPS):
                    inputs, targets, kwargs = case.batch(step)
                    losses.append(pipe.step_global(inputs, targets, **kwargs).loss)
                outcomes.append((losses, pipe.full_state_dict()))
    return outcomes


@pytest.mark.nightly
def test_training_equals_transformers_alone(run_ranks: RunRanks) -> None:
    cases = volume.part(CASES, least=4)
    (expected,) = run_ranks(train_alone, 1, cases, timeout=300)
    found = run_ranks(train_planned, 4, cases, timeout=900)[0]
    for case, ours, theirs in zip(cases, found, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-12), case
        assert ours[1].keys() == theirs[1].keys()
        for name, tensor in theirs[1].items():
            # Not relative: the bias of a key has no gradient, and is what round-off leaves.
            difference = (ours[1][name] - tensor).abs().max()
            assert difference <= 1e-10, f"{name} differs by {difference:.1e}; {case}"
