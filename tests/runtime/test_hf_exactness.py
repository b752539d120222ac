"""Causal LMs of `transformers` train over unequal ranks as they do alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import hf_families
import pytest
import torch
import volume
from hf_families import (
    FAMILIES,
    PADS_LEFT,
    documents,
    exact_norms,
    make_model,
    masks,
    module_names,
    tokens,
    transformers,
)
from ranks import RunRanks
from tiny import adamw
from torch import Tensor, nn

from zorselike import HeteroPipeline, list_modules
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import token_cross_entropy

pytestmark = pytest.mark.pooled

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


IN_REPLICAS = (
    "llama",
    "llama, tied",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt_neox",
    "phi",
)
"""Families whose layers replicas can cut."""


def replicas(names: Sequence[str]) -> Plan:
    """A replica of two beside a rank alone, and another group that is a rank alone; four ministages."""
    plan = two_groups(names)
    microbatches = tuple(Microbatch(*m) for m in ((2, 0, 2), (2, 2, 3), (1, 3, 4), (2, 4, 7)))
    group = replace(plan.groups[0], ranks=((2, 0), 1), microbatches=microbatches)
    return replace(plan, groups=(group, plan.groups[1]), sequence_length=hf_families.LENGTH)


PLANS = {"two groups": two_groups, "three groups": three_groups}


@dataclass(frozen=True)
class Case:
    family: str
    plan: str

    @property
    def own_plan(self) -> Plan:
        return (PLANS | {"replicas": replicas})[self.plan](module_names(self.family))

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
CASES += [Case(family, "replicas") for family in IN_REPLICAS]


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
            with HeteroPipeline(model, case.own_plan, optimizer=adamw) as pipe:
                losses = []
                for step in range(NUM_STEPS):
                    inputs, targets, kwargs = case.batch(step)
                    losses.append(pipe.step_global(inputs, targets, **kwargs).loss)
                outcomes.append((losses, pipe.full_state_dict()))
    return outcomes


@pytest.mark.nightly
def test_training_equals_transformers_alone(run_ranks: RunRanks) -> None:
    cases = volume.part(CASES, least=2, share=20)
    assert all(case.own_plan.num_ranks == 4 for case in cases)  # Names are asked for before ranks are forked.
    (expected,) = run_ranks(train_alone, 1, cases, timeout=300)
    found = run_ranks(train_planned, 4, cases, timeout=900)[0]
    for case, ours, theirs in zip(cases, found, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-12), case
        assert ours[1].keys() == theirs[1].keys()
        for name, tensor in theirs[1].items():
            # Not relative: the bias of a key has no gradient, and is what round-off leaves.
            difference = (ours[1][name] - tensor).abs().max()
            assert difference <= 1e-10, f"{name} differs by {difference:.1e}; {case}"


def train_lengths(rank: int, world_size: int, is_planned: bool) -> tuple[list[float], Any]:
    """Losses of steps, and of an evaluation, each on rows of another length."""
    model = make_model("llama")
    plan = two_groups(module_names("llama"))
    optimizer = None if is_planned else adamw(list(model.parameters()))
    losses = []
    pipe = HeteroPipeline(model, plan, optimizer=adamw, dynamic_shapes=True) if is_planned else None
    for step, length in enumerate((6, 3, 8, 6)):
        inputs, targets = (tokens(ROWS, seed=seed, length=length) for seed in (step, 10 + step))
        if pipe is not None:
            call = pipe.evaluate if step == 2 else pipe.step
            losses.append(
                call(
                    inputs[pipe.input_rows] if pipe.input_rows else None,
                    targets[pipe.target_rows] if pipe.target_rows else None,
                ).loss
            )
            continue
        loss = token_cross_entropy(model(inputs, use_cache=False).logits, targets) / targets.numel()
        losses.append(loss.item())
        if optimizer is not None and step != 2:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if pipe is None:
        return losses, {name: t.detach().clone() for name, t in model.state_dict().items()}
    state = pipe.full_state_dict()
    pipe.close()
    return losses, state


def test_lengths_may_change_from_step_to_step(run_ranks: RunRanks) -> None:
    """Every rank learns them, also those that feed nothing."""
    assert two_groups(module_names("llama")).num_ranks == 4
    ((expected, weights),) = run_ranks(train_lengths, 1, False)
    found = run_ranks(train_lengths, 4, True)
    assert all(losses == pytest.approx(expected, rel=1e-12) for losses, _ in found)
    state = found[0][1]
    assert all((state[name] - tensor).abs().max() <= 1e-10 for name, tensor in weights.items())


@dataclass(frozen=True)
class Adapters:
    """Which of peft's a model has."""

    targets: tuple[str, ...] = ("q_proj", "v_proj")
    dropout: float = 0.0
    family: str = "llama"

    def model(self) -> nn.Module:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(
            r=2, target_modules=[*self.targets], init_lora_weights=False, lora_dropout=self.dropout
        )
        model: nn.Module = peft.get_peft_model(make_model(self.family), config).double()
        return model


@cache
def names_with(adapters: Adapters) -> tuple[str, ...]:
    """As a plan lists them; asked, and peft imported, once before ranks are forked."""
    with torch.device("meta"):
        return tuple(list_modules(adapters.model()))


ALL_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BATCHES = [(tokens(ROWS, seed=step), tokens(ROWS, seed=10 + step)) for step in range(2)]


def train_adapters_planned(
    rank: int, world_size: int, adapters: Adapters, plan: Plan
) -> tuple[list[float], Any]:
    """Losses, and the adapters that peft saves."""
    with HeteroPipeline(adapters.model(), plan, optimizer=adamw) as pipe:
        losses = [pipe.step_global(*batch).loss for batch in BATCHES]
        return losses, {n: t for n, t in pipe.full_state_dict().items() if "lora" in n}


def train_adapters_alone(rank: int, world_size: int, adapters: Adapters) -> tuple[list[float], Any]:
    """The same in plain torch."""
    model, losses = adapters.model(), []
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for inputs, targets in BATCHES:
        loss = token_cross_entropy(model(inputs, use_cache=False).logits, targets) / targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {n: t.detach().clone() for n, t in model.state_dict().items() if "lora" in n}


def assert_same_adapters(
    found: tuple[list[float], Any], expected: tuple[list[float], Any], count: int
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1].keys() == expected[1].keys() and len(found[1]) == count * hf_families.NUM_LAYERS
    assert all((found[1][name] - tensor).abs().max() <= 1e-10 for name, tensor in expected[1].items())


def test_adapters_of_peft_train_as_they_do_alone(run_ranks: RunRanks) -> None:
    adapters = Adapters()
    plan = two_groups(names_with(adapters))
    (expected,) = run_ranks(train_adapters_alone, 1, adapters)
    found = run_ranks(train_adapters_planned, 4, adapters, plan)
    assert_same_adapters(found[0], expected, 4)


def test_adapters_train_in_replicas_as_they_do_alone(run_ranks: RunRanks) -> None:
    """Beside layers that are cut by what they give and by what they take."""
    adapters = Adapters(ALL_LAYERS, family="qwen2")
    plan = replicas(names_with(adapters))
    (expected,) = run_ranks(train_adapters_alone, 1, adapters)
    found = run_ranks(train_adapters_planned, 4, adapters, plan)
    assert_same_adapters(found[0], expected, 2 * len(adapters.targets))


def on_one_rank(names: Sequence[str]) -> Plan:
    """With the microbatches of `replicas`."""
    rows = ((0, 2), (2, 3), (3, 4), (4, 7))
    return Plan(
        ROWS, (Group((0,), tuple(Microbatch(0, *own) for own in rows)),), (Ministage(0, tuple(names)),)
    )


def one_group_of_replicas(names: Sequence[str]) -> Plan:
    """Of four ranks, the last with all of the layers."""
    plan = replicas(names)
    group = replace(plan.groups[0], ranks=((0, 1), (2, 3)), zero=2, recompute="layer")
    booked = tuple(replace(m, rank={2: 0, 1: 2}[m.rank]) for m in group.microbatches)
    group = replace(group, microbatches=booked)
    return replace(plan, groups=(group,), ministages=(Ministage(0, tuple(names)),))


def train_dropping(
    rank: int, world_size: int, rates: Sequence[float], plan: Plan
) -> list[tuple[list[float], Any]]:
    """Phi drops what its blocks give, in its layers."""
    found = []
    for rate in rates:
        with HeteroPipeline(make_model("phi", resid_pdrop=rate), plan, optimizer=adamw) as pipe:
            losses = [pipe.step_global(*batch).loss for batch in BATCHES]
            found.append((losses, pipe.full_state_dict()))
    return found


def test_dropout_beside_what_is_cut_is_that_of_one_rank(run_ranks: RunRanks) -> None:
    names = module_names("phi")
    ((expected, without),) = run_ranks(train_dropping, 1, (0.3, 0.0), on_one_rank(names))
    assert abs(expected[0][0] - without[0][0]) > 1e-4
    ((losses, state),) = run_ranks(train_dropping, 4, (0.3,), one_group_of_replicas(names))[0]
    assert losses == pytest.approx(expected[0], rel=1e-12)
    assert all((state[name] - tensor).abs().max() <= 1e-10 for name, tensor in expected[1].items())


def test_dropout_of_adapters_is_that_of_one_rank(run_ranks: RunRanks) -> None:
    """Beside layers of both kinds, in both blocks."""
    targets = ("q_proj", "o_proj", "up_proj", "down_proj")
    adapters = Adapters(targets, dropout=0.3)
    names = names_with(adapters)
    (expected,) = run_ranks(train_adapters_planned, 1, adapters, on_one_rank(names))
    (without,) = run_ranks(train_adapters_planned, 1, replace(adapters, dropout=0.0), on_one_rank(names))
    assert abs(expected[0][0] - without[0][0]) > 1e-4
    found = run_ranks(train_adapters_planned, 4, adapters, one_group_of_replicas(names))
    assert_same_adapters(found[0], expected, 2 * len(adapters.targets))


REWARDS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5, 0.25], dtype=torch.float64)


def train_rewards(rank: int, world_size: int, plan: Plan | None) -> tuple[list[float], Any]:
    """A Llama that gives each row one number, adapters of peft's around it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**FAMILIES["llama"], num_labels=1)
    inner = transformers.LlamaForSequenceClassification(config)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS", init_lora_weights=False)
    model: Any = peft.get_peft_model(inner, lora).double().train()
    mask, losses = masks(ROWS, left=False), []
    if plan is not None:
        with HeteroPipeline(
            model,
            plan,
            optimizer=adamw,
            unpack=lambda output: output.logits,
            loss_fn=lambda found, wanted: (found[:, 0] - wanted).square().sum(),
            count_fn=len,
        ) as pipe:
            losses = [pipe.step_global(inputs, REWARDS, attention_mask=mask).loss for inputs, _ in BATCHES]
            return losses, pipe.full_state_dict()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for inputs, _ in BATCHES:
        logits = model(inputs, attention_mask=mask, use_cache=False).logits
        loss = (logits[:, 0] - REWARDS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: t.detach().clone() for name, t in model.state_dict().items()}


def test_what_recomputes_layers_keeps_no_cache_of_keys(run_ranks: RunRanks) -> None:
    """A model with another head than for tokens would keep one, and layers would find their keys there."""
    layers = [f"model.layers.{i}" for i in range(hf_families.NUM_LAYERS)]
    names = [f"base_model.model.{n}" for n in ("model.embed_tokens", *layers, "model.norm", "score")]
    group = Group((0, 1), (Microbatch(0, 0, 4), Microbatch(1, 4, ROWS)), recompute="layer")
    plan = Plan(ROWS, (group,), (Ministage(0, tuple(names)),))
    ((expected, weights),) = run_ranks(train_rewards, 1, None)
    losses, state = run_ranks(train_rewards, 2, plan)[0]
    assert losses == pytest.approx(expected, rel=1e-12)
    assert all((state[name] - tensor).abs().max() <= 1e-10 for name, tensor in weights.items())
