"""What tensor parallelism cuts of a model, and what it refuses before work starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from replica_cases import ReplicaCase
from tiny import module_names
from torch import Tensor, nn

from zorselike.errors import ConfigError, PlanError
from zorselike.models.gpt import GPT, GPTConfig
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.arguments import refuse_with_replicas
from zorselike.runtime.assembly import compile_plan
from zorselike.runtime.model.boundaries import StepInputs
from zorselike.runtime.model.signature import Signature, TensorSpec
from zorselike.runtime.tensor_parallel.position_check import refuse_mixed_positions
from zorselike.runtime.tensor_parallel.styles import find_blocks, find_cuts

OWN = {"layers.*.attention.wq": "colwise", "layers.*.attention.wo": "rowwise"}
FEED_FORWARD = {"layers.*.feed_forward.w1": "colwise", "layers.*.feed_forward.w2": "rowwise"}


def plan_of(num_ranks: int, *, num_layers: int = 1) -> Plan:
    group = Group((tuple(range(num_ranks)),), (Microbatch(0, 0, 1),))
    return Plan(1, (group,), (Ministage(0, tuple(module_names(num_layers))),), sequence_length=16)


def llama(num_layers: int = 1) -> nn.Module:
    return ReplicaCase(plan_of(2), num_layers).model()


def gpt() -> nn.Module:
    config = GPTConfig(dim=8, num_layers=1, num_heads=2, ffn_hidden=8, vocab_size=8, max_seq_len=16)
    with torch.device("meta"):
        return GPT(config)


def test_heads_stay_whole_and_widths_may_be_ragged() -> None:
    model = llama(2)
    blocks = find_blocks(model)
    assert list(blocks) == ["layers.0", "layers.1"]
    attention, feed_forward = blocks["layers.1"]
    assert (attention.num_units, feed_forward.num_units) == (6, 13)
    cuts = find_cuts(model, blocks["layers.1"], 4)
    assert cuts["layers.1.attention.wq.weight"].edges == (0, 4, 12, 16, 24)
    assert cuts["layers.1.attention.wk.weight"].edges == (0, 2, 6, 8, 12)
    assert (cuts["layers.1.attention.wo.weight"].dim, cuts["layers.1.attention.wq.weight"].dim) == (1, 0)
    assert cuts["layers.1.feed_forward.w2.weight"].edges == (0, 3, 6, 9, 13)


def test_a_bias_is_cut_with_the_rows_of_its_weight_alone() -> None:
    model = gpt()
    cuts = find_cuts(model, [block for blocks in (FEED_FORWARD,) for block in feed_forward_of(model)], 2)
    assert cuts["layers.0.feed_forward.w1.bias"] == cuts["layers.0.feed_forward.w1.weight"]
    assert "layers.0.feed_forward.w2.bias" not in cuts


def feed_forward_of(model: nn.Module) -> list[object]:
    model.layers["0"].attention = nn.Identity()
    return [*find_blocks(model, FEED_FORWARD)["layers.0"]]


def with_head_count(model: nn.Module) -> nn.Module:
    attention = model.layers["0"].attention
    attention.num_heads = attention.head_dim
    del attention.head_dim
    return model


def with_dropout(model: nn.Module) -> nn.Module:
    model.layers["0"].attention.dropout = nn.Dropout(0.1)
    return model


def with_shared_weights(model: nn.Module) -> nn.Module:
    model.layers["1"].attention.wq.weight = model.layers["0"].attention.wq.weight
    return model


def with_head_dim(model: nn.Module) -> nn.Module:
    """A fused projection whose halves a cut would take for heads, though shapes agree."""
    attention = model.layers["0"].attention
    attention.head_dim = 4
    return model


def with_inner_rows(model: nn.Module) -> nn.Module:
    """As Doge has them: a product of values that its attention itself needs, of all positions."""
    model.layers["0"].attention.dt = nn.Linear(12, 6, dtype=torch.float64)
    return model


FUSED = {**FEED_FORWARD, "layers.*.attention.wqkv": "colwise", "layers.*.attention.wo": "rowwise"}


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, h: Tensor) -> Tensor:
        return self.w2(self.w1(h).relu().roll(1, 1))  # Inside it may.


class MixingLayer(nn.Module):
    """What it does outside of what is cut is given."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.feed_forward, self.mix = nn.LayerNorm(8), FeedForward(), mix

    def forward(self, h: Tensor) -> Tensor:
        return h + self.feed_forward(self.mix(self.norm(h)))


class Mixing(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(5, 8)
        self.layers = nn.ModuleDict({"0": MixingLayer(mix)})
        self.norm, self.output = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


@pytest.mark.parametrize(
    ("mix", "does"),
    [
        (lambda h: h.cumsum(1), "cumsum"),
        (lambda h: h + h.mean(1, keepdim=True), "mean"),
        (lambda h: h - h.mean(), "mean"),
        (lambda h: h.roll(1, 1), "roll"),
        (lambda h: h + h[:, :1], "getitem"),
        (lambda h: h.softmax(1), "softmax"),
        (lambda h: h.mT.mT, "get"),
        (lambda h: nn.functional.layer_norm(h, h.shape[1:]), "layer_norm"),
        (lambda h: nn.functional.conv1d(h, h.new_ones(16, 16, 1)), "conv1d"),
        (lambda h: h * h.pow(2).mean(-1, keepdim=True).rsqrt().type_as(h) + 1.0, None),
        (lambda h: nn.functional.rms_norm(h.double().float(), (8,)).softmax(-1), None),
    ],
)
def test_layers_that_mix_positions_outside_of_what_is_cut_are_refused(
    mix: Callable[[Tensor], Tensor], does: str | None
) -> None:
    with torch.device("meta"):
        model = Mixing(mix)
    compiled = compile_plan(model, plan_of(2), tp_plan=FEED_FORWARD)
    step = StepInputs(Signature((TensorSpec((16,), torch.int64),)), {})
    refused = pytest.raises(
        ConfigError, match=f"'layers.0' does '_*{does}_*' with hidden states outside of the"
    )
    with refused if does else nullcontext():
        refuse_mixed_positions(compiled.parts, compiled.cut.blocks, step)


@pytest.mark.parametrize(
    ("model", "tp_plan", "message"),
    [
        (gpt, None, r"GPT has no tp_plan that says how its layers are cut; pass HeteroPipeline tp_plan="),
        (llama, "colwise", r"tp_plan = 'colwise' is no mapping of names to styles; give one such as"),
        (llama, {"layers.*.attention.wq": 1}, r"wq': 1\} is no mapping of names to styles"),
        (llama, {"layers.*.attention.wqq": "colwise"}, r"tp_plan names 'layers.\*.attention.wqq', which no"),
        (llama, {"layers.*.attention.wq": "packed_colwise"}, r"style 'packed_colwise' of 'layers.0.att"),
        (llama, {"layers.*.attention": "colwise"}, r"'layers.0.attention' is a Attention, and only an nn.Li"),
        (
            llama,
            {"layers.*.attention.wq": "colwise"},
            r"'layers.0.attention' has colwise layers and no rowwise",
        ),
        (llama, OWN, r"leaves 'layers.0.attention.wk.weight' whole, a matrix in a layer that is cut"),
        (gpt, FEED_FORWARD, r"leaves 'layers.0.attention.wqkv.weight' whole"),
        (
            lambda: with_head_dim(gpt()),
            FUSED,
            r"wqkv' gives 24 numbers, .* takes 8: a fused",
        ),
        (lambda: with_head_count(llama()), None, r"'layers.0.attention' counts heads and has no attribute"),
        (
            lambda: with_inner_rows(llama()),
            {**llama().tp_plan, "layers.*.attention.dt": "rowwise"},
            r"'layers.0.attention.dt' gives 6 numbers and '.*wo' 24, and what is rowwise gives hidden",
        ),
        (lambda: with_dropout(llama()), None, r"'layers.0.attention.dropout.p' drops out 0.1"),
        (lambda: llama(2), {k.replace("*", "0"): v for k, v in llama().tp_plan.items()}, r"cuts 'layers.1'"),
        (lambda: with_shared_weights(llama(2)), None, r"'layers.0' shares a weight with another"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: Callable[[], nn.Module], tp_plan: Any, message: str) -> None:
    made = model()
    with pytest.raises(ConfigError, match=message):
        compile_plan(made, plan_of(2, num_layers=len(made.layers)), tp_plan=tp_plan)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(PlanError, match=r"layers.0.* 6"):
        compile_plan(llama(), plan_of(7))


def test_what_replicas_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"=True does not work with tensor-parallel replicas: .*pad rows"):
        refuse_with_replicas(plan_of(2), dynamic_shapes=True)
    refuse_with_replicas(plan_of(2), dynamic_shapes=False)
