"""How a model is told which tokens of a row are of one document."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zorselike.errors import ConfigError
from zorselike.runtime.model.part import Keywords
from zorselike.train.data.rows import Numbers

_HUGGING_FACE = ("position_ids",)
_OURS = ("positions", "document_ids")
_MAKE_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
"""Functions by which models of `transformers` keep apart documents whose positions restart."""
_WITH_MASKS = ("eager", "sdpa", "flex_attention")
"""Attention that takes masks of any shape; others find documents in batches of one row only."""
_ATTENDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers that see what the mask lets them see; others may carry a state along the row."""


def document_keywords(model: nn.Module, seq_len: int = 0) -> tuple[str, ...]:
    """Names of the keyword arguments that keep the documents of a row apart in this model.

    The model may be on the meta device. Raises `ConfigError` where none do, in rows of `seq_len` tokens.
    """
    inner: Any = model
    while hasattr(inner, "get_base_model"):  # Wrapped by peft.
        inner = inner.get_base_model()
    names = Keywords.of(inner.forward)
    if frozenset(_OURS) <= names:
        return _OURS
    if reason := _find_obstacle(inner, names):
        raise ConfigError(
            f"[training] packing = true: {type(inner).__name__} {reason}, so documents in one row would see "
            "each other; set packing = false, which gives each a row of its own"
        )
    if most := _short_positions(inner.config.get_text_config(), seq_len):
        raise ConfigError(
            f"[training] packing = true: {type(inner).__name__} turns positions otherwise (longrope) where a "
            f"document is longer than {most} tokens, and all in the rows beside it then too; set packing = "
            f"false, or seq_len to {most} or less"
        )
    return _HUGGING_FACE


def _short_positions(config: Any, seq_len: int) -> int:
    """How many positions a row may have whose documents would change each other's rotations; 0: any."""
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = rotary.values() if all(isinstance(kind, dict) for kind in rotary.values()) else [rotary]
    limits = [
        int(kind["original_max_position_embeddings"]) for kind in kinds if kind.get("rope_type") == "longrope"
    ]
    return min((most for most in limits if most < seq_len), default=0)


def _find_obstacle(model: Any, names: frozenset[str]) -> str:
    if not frozenset(_HUGGING_FACE) <= names:
        return "takes no position_ids"
    if not _masks_by_positions(model):
        return "makes its attention masks without regard to position_ids"
    config = model.config.get_text_config()
    attention = config._attn_implementation
    if attention not in _WITH_MASKS:
        return f"computes attention by {attention}, which finds no documents in a batch of several rows"
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or kinds - set(_ATTENDS):
        return "has layers that carry a state along the row"
    return ""


class _MaskMade(Exception):
    """Ends a forward where it makes its first mask."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.by_positions = arguments.get("position_ids") is not None


def _masks_by_positions(model: Any) -> bool:
    """Whether a forward hands position ids on to where masks are made; some (OPT) use them otherwise."""
    home: Any = sys.modules[type(model).__module__]
    made_by = {name: getattr(home, name) for name in _MAKE_MASKS if hasattr(home, name)}

    def replace(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> None:
            raise _MaskMade(inspect.signature(function).bind(*args, **kwargs).arguments)

        return make

    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    try:
        for name, function in made_by.items():
            setattr(home, name, replace(function))
        if made_by:
            with torch.no_grad():
                model(ids, position_ids=ids, use_cache=False)
    except _MaskMade as made:
        return made.by_positions
    finally:
        for name, function in made_by.items():
            setattr(home, name, function)
    return False


def name_documents(positions: Numbers, keywords: Sequence[str]) -> dict[str, Tensor]:
    """Some of the arguments named by `document_keywords`, from each token's position in its document,
    `[rows, seq_len]`."""
    found = {name: torch.from_numpy(positions) for name in keywords}
    if "document_ids" in found:
        found["document_ids"] = torch.from_numpy((positions == 0).cumsum(axis=1))
    return found
