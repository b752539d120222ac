"""Causal LMs of `transformers` on fake tensors, run as they train on real ones: on token ids."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from zorselike.hf.lora import lora_layers
from zorselike.runtime.loss import token_cross_entropy
from zorselike.runtime.model.causal_lm import is_causal_lm
from zorselike.runtime.model.part import Keywords

ADAPTERS = " lora "
"""In names of models, between the model and the rank of its adapters."""


def training_arguments(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of a causal LM of `transformers`; none for other models.

    It keeps no keys and values, and where it would look for several documents in a row, which it cannot see
    in fake tensors, it is told that there is one: else a mask would take the place of causal attention.
    """
    if not is_causal_lm(model):
        return {}
    keywords = Keywords.of(model.forward)
    given: dict[str, Any] = {"use_cache": False} if "use_cache" in keywords else {}
    if "past_key_values" in keywords:
        given["past_key_values"] = _make_empty_cache()
    return given


def use_grouped_experts(model: nn.Module) -> None:
    """Lets a causal LM's experts, if it has some, compute in the way whose shapes do not depend on values,
    and that a GPU trains with."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "_experts_implementation", None) is not None:
        config._experts_implementation = "grouped_mm"


def _make_empty_cache() -> Any:
    cache: Any = import_module("transformers").DynamicCache()
    cache.update = lambda keys, values, *args, **kwargs: (keys, values)
    return cache


def name_adapters(model: nn.Module) -> str:
    """` lora 16`, the rank of a model's adapters, the largest if it has several; empty if it has none."""
    ranks = [a.out_features for layer in lora_layers(model).values() for a in layer.lora_A.values()]
    return f"{ADAPTERS}{max(ranks)}" if ranks else ""


def causal_lm_loss(output: Any) -> Tensor:
    """The loss of the training program, of what the model returns; targets are any."""
    logits: Tensor = output.logits
    return token_cross_entropy(
        logits, torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    )
