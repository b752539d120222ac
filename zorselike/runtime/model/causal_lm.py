"""What a causal LM of Hugging Face's `transformers` is made of: decoder layers, and what is around them.

Known by what every such model offers, never by its class, so `transformers` itself is not needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

from torch import Tensor, nn

from zorselike.errors import ConfigError
from zorselike.runtime.model.pruning import join

_OFFERS = (
    "config",
    "base_model_prefix",
    "get_input_embeddings",
    "get_output_embeddings",
    "_no_split_modules",
)


_LOOKS = "find_packed_sequence_indices"
"""Of `transformers.masking_utils`: which document of its row each token is of; None where rows hold one."""

_SKIPS = "_ignore_causal_mask_sdpa"
"""Of the same: whether rows are attended to as if there were no mask, given that mask first."""

_FLASH_LOOKS = "_is_packed_sequence"
"""Of `transformers.modeling_flash_attention_utils`: whether a batch, which must be of one row, holds several
documents."""


@contextmanager
def telling_of_rows(are_packed: bool | None, are_padded: bool | None) -> Iterator[None]:
    """Inside, models of `transformers` hear whether rows hold several documents each, and whether their
    attention mask leaves tokens out. They would look into position ids and mask before they make a mask of
    their own, or in each layer, and a host would wait for its GPU in every forward. None: they look.

    Raises `ConfigError` inside where flash attention is given documents in several rows: it keeps them apart
    in a row alone, and so what a step comes to would depend on the plan's microbatches.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    flash: Any = sys.modules.get("transformers.modeling_flash_attention_utils")
    looks, skips = getattr(masks, _LOOKS, None), getattr(masks, _SKIPS, None)
    flash_looks = getattr(flash, _FLASH_LOOKS, None)

    def tell_packed(position_ids: Tensor) -> Tensor | None:
        if not are_packed:
            return None
        before = position_ids[:, :1] - 1
        return (position_ids.diff(prepend=before, dim=-1) != 1).cumsum(-1)

    def tell_padded(mask: Tensor | None, *lengths: Any, **named_lengths: Any) -> Any:
        if mask is not None and are_padded:
            return False
        assert skips is not None
        return skips(None, *lengths, **named_lengths)

    answers = [
        (masks, _LOOKS, looks, tell_packed if are_packed is not None else looks),
        (masks, _SKIPS, skips, tell_padded if are_padded is not None else skips),
        (flash, _FLASH_LOOKS, flash_looks, _flash_answer(are_packed, flash_looks)),
    ]
    answers = [entry for entry in answers if entry[2] is not None]
    for module, name, _, answer in answers:
        setattr(module, name, answer)
    try:
        yield
    finally:
        for module, name, own, _ in answers:
            setattr(module, name, own)


@cache
def _flash_answer(are_packed: bool | None, looks: Any) -> Any:
    """In the place of `looks`; one for each answer, so that `torch.compile` knows it again."""

    def tell(position_ids: Tensor | None, batch_size: int) -> bool:
        found = are_packed
        if found is None:
            is_flat = position_ids is None or position_ids.dim() == 2  # One row of it, or one for each.
            found = bool(looks(position_ids, 1 if is_flat else batch_size))
        if found and batch_size > 1:
            raise ConfigError(
                "position_ids: rows hold several documents each, and flash attention of transformers keeps "
                f"these apart in microbatches of one row, not of {batch_size}; take attention by sdpa or "
                "flex_attention, or plan microbatches of one row"
            )
        return found

    return tell


def keep_rotations(fake: nn.Module) -> None:
    """Lets a model's copy on fake tensors rotate as it began to (`rope_type = "dynamic"`): it would look how
    long rows are, which no fake position says, and only values depend on it."""
    for module in fake.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {layers: _still(one) for layers, one in kind.items()}  # type: ignore[assignment]
        elif isinstance(kind, str):
            module.rope_type = _still(kind)  # type: ignore[assignment]


def attend_plainly(fake: nn.Module) -> None:
    """Lets a model's copy on fake tensors compute attention by what is no kernel for a GPU, as flash and flex
    attention are: these look into masks, of which no fake one says anything, or refuse what is on a CPU, as
    fake tensors are. Shapes are the same."""
    for module in fake.modules():
        config: Any = getattr(module, "config", None)
        attention = getattr(config, "_attn_implementation", None) or ""
        if "flash" in attention or "flex" in attention:
            config._attn_implementation = "sdpa"


def _still(kind: str) -> str:
    return "default" if "dynamic" in kind else kind


def keeps_cache(module: nn.Module) -> bool:
    """Whether a model of `transformers`, or what peft wraps round one, can be told to keep no keys and values
    of its layers. By default many do, and a layer that is recomputed finds its own among them."""
    model: Any = getattr(module, "get_base_model", lambda: module)()
    is_known = hasattr(model, "config") and hasattr(model, "base_model_prefix")
    return is_known and "use_cache" in signature(model.forward).parameters


def is_causal_lm(model: nn.Module) -> bool:
    """Whether a model is one of `transformers` with a head for tokens, or is wrapped around one."""
    return all(hasattr(model, name) for name in _OFFERS) and all(
        _has(model, name) for name in ("get_input_embeddings", "get_output_embeddings")
    )


def _has(model: nn.Module, method: str) -> bool:
    try:
        return getattr(model, method)() is not None
    except (AttributeError, NotImplementedError):
        return False


@dataclass(frozen=True)
class Decoder:
    """The modules between which a causal LM may be cut, by their names in the model."""

    layers: tuple[str, ...]
    """Members of the one list of decoder layers."""
    others: tuple[str, ...]
    """Modules with parameters outside that list (embeddings, norm, head), as they are registered."""


def find_decoder(model: nn.Module) -> Decoder | str:
    """The parts of a causal LM, or the reason why it has none to cut between."""
    kinds = _layer_classes(model)
    lists = _lists_of(model, kinds)
    if not lists:
        kinds |= _repeated_classes(model)
        lists = _lists_of(model, kinds)
    if len(lists) != 1:
        found = " and ".join(f"'{name}'" for name, _ in lists) or "no list"
        return f"{found} of {' or '.join(sorted(kinds)) or 'layers'} found where one is needed"
    if not _has(model, "get_input_embeddings"):
        return "it has no embeddings of token ids"
    ((where, members),) = lists
    layers = tuple(join(where, key) for key in members._modules)
    others = tuple(_outside(model, "", where))
    if len({id(model.get_submodule(name)) for name in (*layers, *others)}) < len(layers) + len(others):
        return "one module is used under several names"
    placed = {id(p) for name in (*layers, *others) for p in model.get_submodule(name).parameters()}
    loose = [name for name, p in model.named_parameters() if id(p) not in placed]
    return f"'{loose[0]}' is in no module" if loose else Decoder(layers, others)


def _lists_of(model: nn.Module, kinds: set[str]) -> list[tuple[str, nn.ModuleList]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
        if all(type(member).__name__ in kinds for member in module)
    ]


def _layer_classes(model: nn.Module) -> set[str]:
    """Names of the classes that must not be split over devices: those of the decoder layers."""
    names: Any = getattr(model, "_no_split_modules", None)
    return {names} if isinstance(names, str) else set(names or ())


def _repeated_classes(model: nn.Module) -> set[str]:
    """For a model that does not say which these are, or names their parts: classes of which there is one in
    every layer."""
    config: Any = getattr(model, "config", None)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {
        type(module[0]).__name__
        for module in lists
        if len(module) and len(module) == getattr(config, "num_hidden_layers", None)
    }


def _outside(module: nn.Module, fqn: str, where: str) -> Iterator[str]:
    for key, child in module.named_children():
        name = join(fqn, key)
        if where.startswith(f"{name}."):
            yield from _outside(child, name, where)
        elif name == where or next(child.parameters(), None) is None:
            continue
        elif isinstance(child, nn.ModuleList | nn.ModuleDict):  # never called itself
            yield from _outside(child, name, where)
        else:
            yield name
