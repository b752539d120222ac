"""Causal LMs of `transformers`, a tiny one of each family, with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zorselike.hf
from zorselike import list_modules
from zorselike.hf.lora import Lora

transformers = pytest.importorskip("transformers")
# Imported once, and not by each rank: that takes seconds.
transformers.LlamaForCausalLM  # noqa: B018
torch.zeros(1, device="meta") + 1
transformers.logging.set_verbosity_error()  # It finds special tokens outside of so small a vocabulary.

VOCABULARY = 19
LENGTH = 6
NUM_LAYERS = 5

_NAMES: dict[tuple[str, Lora | None], tuple[str, ...]] = {}


def names_of(folder: Path, lora: Lora | None = None) -> tuple[str, ...]:
    """Of the modules of a folder's model. To find them takes as long as a step: ranks that stay know those of
    every folder with the same config."""
    key = (folder / "config.json").read_text(), lora
    if key not in _NAMES:
        _NAMES[key] = tuple(list_modules(zorselike.hf.build_on_meta(folder, lora=lora)))
    return _NAMES[key]


_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 32}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_OPT = {"ffn_dim": 24, "word_embed_proj_dim": 8, "dropout": 0.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_GROUPED},
    "llama, tied": {"model_type": "llama", **_GROUPED, "tie_word_embeddings": True},
    # Of its five layers the last three see the three newest tokens only.
    "qwen2": {"model_type": "qwen2", **_GROUPED, "use_sliding_window": True, "sliding_window": 3}
    | {"max_window_layers": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_GROUPED, "head_dim": 4},
    "mistral": {"model_type": "mistral", **_GROUPED, "sliding_window": 3},
    "gemma": {"model_type": "gemma", **_GROUPED, "head_dim": 4},
    "gemma2": {"model_type": "gemma2", **_GROUPED, "head_dim": 4, "sliding_window": 8},
    "gemma3": {"model_type": "gemma3_text", **_GROUPED, "head_dim": 4, "sliding_window": 3},
    "gpt2": {"model_type": "gpt2", **_GPT2, **_NO_DROPOUT},
    "gpt_neox": {"model_type": "gpt_neox", **_COMMON},
    "opt": {"model_type": "opt", **_COMMON, **_OPT},
    "phi": {"model_type": "phi", **_GROUPED},
    # In fp64 the CPU has no grouped matrix product.
    "mixtral": {
        "model_type": "mixtral",
        **_GROUPED,
        "num_local_experts": 3,
        "experts_implementation": "eager",
    },
}
PADS_LEFT = [name for name in FAMILIES if name != "gemma2"]
"""Gemma 2 computes softmax in fp32, where an fp64 model's mask is -inf: a token that sees none gets NaN."""


def make_model(name: str, **changes: Any) -> nn.Module:
    """In fp64 and in training mode, the same at every call; `torch.device("meta")` is heeded."""
    torch.manual_seed(0)
    settings = {**FAMILIES[name], **changes}
    config = transformers.AutoConfig.for_model(**settings)
    if "experts_implementation" in settings:
        config._experts_implementation = settings["experts_implementation"]
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.double().train()


@cache
def module_names(name: str) -> tuple[str, ...]:
    """As a plan lists them. Asked once before ranks are forked, which find these and much that torch keeps
    of such a model."""
    with torch.device("meta"):
        return list_modules(make_model(name))


@contextmanager
def exact_norms(name: str) -> Iterator[None]:
    """Gemma computes its norms in fp32, and with them gradients that are sums over rows: inside, in fp64."""
    with (
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double) if "gemma" in name else mock.MagicMock()
    ):
        yield


def tokens(rows: int, *, seed: int = 0, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def masks(rows: int, *, left: bool) -> Tensor:
    """One row is whole, others are padded, on the left (or else only) on the right."""
    mask = torch.ones(rows, LENGTH, dtype=torch.int64)
    for row in range(1, rows):
        if left and row % 2:
            mask[row, : 1 + row % 3] = 0
        else:
            mask[row, LENGTH - 1 - row % 3 :] = 0
    return mask


def documents(rows: int) -> Tensor:
    """Positions of two documents in every other row, and of one in the others."""
    packed = torch.tensor([0, 1, 2, 3, 0, 1])
    return torch.stack([packed if row % 2 == 0 else torch.arange(LENGTH) for row in range(rows)])


def family_names(names: Sequence[str]) -> list[str]:
    """Names of a model's modules without those of layers."""
    return [name for name in names if not name.rpartition(".")[2].isdigit()]
