"""What every model of ours promises, Llama and GPT alike. Forwards only."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from zorselike.errors import ConfigError
from zorselike.models import Decoder, build_model
from zorselike.runtime.model.initialize import initialize

pytestmark = pytest.mark.pooled

NAMES = ("llama", "gpt")


def build(name: str, *, dtype: torch.dtype = torch.float64, **overrides: Any) -> Decoder:
    with torch.device("meta"):
        model = build_model(name, "debug", num_layers=4, **overrides)
    return initialize(model, seed=3, dtype=dtype).requires_grad_(False)


def some_tokens(rows: int = 3, seq_len: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, seq_len), generator=generator)


def cut(model: Decoder, layers: range, *, first: bool, last: bool) -> Decoder:
    """A part of the model, as a ministage holds it."""
    part = copy.copy(model)
    part._modules = dict(model._modules)
    part.layers = torch.nn.ModuleDict({str(i): model.layers[str(i)] for i in layers})
    if not first:
        part.tok_embeddings = None
    if not last:
        part.norm = part.output = None
    return part


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_logits_have_their_shape_and_dtype(name: str, dtype: torch.dtype) -> None:
    logits = build(name, dtype=dtype)(some_tokens())
    assert logits.shape == (3, 16, 256)
    assert logits.dtype == dtype
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_meta(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, "debug")
    logits = model(some_tokens().to("meta"), document_ids=some_tokens().to("meta"))
    assert logits.is_meta
    assert logits.shape == (3, 16, 256)


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_of_parts_is_the_whole(name: str) -> None:
    model = build(name)
    tokens = some_tokens()
    kwargs = {
        "positions": torch.arange(16).expand(3, 16) + torch.tensor([[0], [5], [9]]),
        "document_ids": (torch.arange(16) // 5).expand(3, 16),
    }
    parts = [
        cut(model, range(1), first=True, last=False),
        cut(model, range(1, 3), first=False, last=False),
        cut(model, range(3, 3), first=False, last=False),
        cut(model, range(3, 4), first=False, last=True),
    ]
    names = {name for part in parts for name in part.state_dict()}
    assert names == set(model.state_dict())
    for given in ({}, kwargs):
        h = tokens
        for part in parts:
            h = part(h, **given)
        assert torch.equal(h, model(tokens, **given))


@pytest.mark.parametrize("name", NAMES)
def test_a_token_sees_none_after_it(name: str) -> None:
    model = build(name)
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_see_each_other(name: str) -> None:
    model = build(name)
    tokens = some_tokens()
    alone = torch.cat([model(row.unsqueeze(0)) for row in tokens])
    torch.testing.assert_close(model(tokens), alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_default_positions_count_from_zero(name: str) -> None:
    model = build(name)
    tokens = some_tokens()
    counted = model(tokens, positions=torch.arange(16).expand(3, 16))
    torch.testing.assert_close(model(tokens), counted, rtol=0, atol=1e-12)
    reversed_ = model(tokens, positions=torch.arange(15, -1, -1).expand(3, 16))
    assert (counted - reversed_).abs().max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_as_if_alone(name: str) -> None:
    model = build(name)
    first, second = some_tokens(2, 7, seed=1), some_tokens(2, 9, seed=2)
    packed = model(
        torch.cat([first, second], dim=1),
        positions=torch.cat([torch.arange(7), torch.arange(9)]).expand(2, 16),
        document_ids=torch.tensor([4] * 7 + [2] * 9).expand(2, 16),
    )
    alone = torch.cat([model(first), model(second)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_too_long_a_sequence_is_refused(name: str) -> None:
    model = build(name, max_seq_len=8)
    with pytest.raises(ConfigError, match="max_seq_len = 8"):
        model(some_tokens())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_ties_survive_initialisation(name: str, tied: bool) -> None:
    model = build(name, tie_embeddings=tied)
    table = model.get_parameter(
        "tok_embeddings.weight" if name == "llama" else "tok_embeddings.tokens.weight"
    )
    assert (model.get_parameter("output.weight") is table) == tied


def _grad_norms(rank: int, world_size: int, name: str) -> dict[str, float]:
    model = build(name, tie_embeddings=True).requires_grad_(True)
    tokens = some_tokens(2, 12)
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return {k: float("nan") if p.grad is None else p.grad.norm().item() for k, p in model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name: str, run_ranks: Any) -> None:
    [norms] = run_ranks(_grad_norms, 1, name)
    assert all(norm > 0 for norm in norms.values()), norms
