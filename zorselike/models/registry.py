"""Models by name and flavor, as a recipe's `[model]` section names them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from zorselike.errors import ConfigError
from zorselike.models.decoder import Decoder, DecoderConfig
from zorselike.models.gpt import GPT, GPT_FLAVORS
from zorselike.models.llama import LLAMA_FLAVORS, Llama

_Family = tuple[Callable[[Any], Decoder], Mapping[str, DecoderConfig]]

_FAMILIES: dict[str, _Family] = {"llama": (Llama, LLAMA_FLAVORS), "gpt": (GPT, GPT_FLAVORS)}
"""How a family is built, and the config of each flavor."""


def model_names() -> tuple[str, ...]:
    """The names that `build_model` knows."""
    return tuple(_FAMILIES)


def flavors(name: str) -> tuple[str, ...]:
    """The flavors of a model; raises `ConfigError` for an unknown name."""
    _, known = _family(name)
    return tuple(known)


def get_config(name: str, flavor: str, **overrides: Any) -> DecoderConfig:
    """The config of a model; `overrides` replace single fields.

    Raises `ConfigError`, with the nearest valid word, for an unknown name, flavor or field.
    """
    _, known = _family(name)
    if flavor not in known:
        raise ConfigError(f"model: {name} has no flavor '{flavor}'{_suggest(flavor, known)}")
    config = known[flavor]
    names = [field.name for field in fields(config)]
    for key in overrides:
        if key not in names:
            raise ConfigError(f"model: {name} has no setting '{key}'{_suggest(key, names)}")
    return replace(config, **overrides)


def build_model(name: str, flavor: str, **overrides: Any) -> Decoder:
    """Builds a model under the current `torch.device` context, as a rule `meta`.

    Raises `ConfigError` as `get_config` does.
    """
    build, _ = _family(name)
    return build(get_config(name, flavor, **overrides))


def module_names(config: DecoderConfig) -> list[str]:
    """The names by which a plan's ministages list the model's modules, in model order."""
    return ["tok_embeddings", *(f"layers.{i}" for i in range(config.num_layers)), "norm", "output"]


def _family(name: str) -> _Family:
    if name not in _FAMILIES:
        raise ConfigError(f"model: there is no model '{name}'{_suggest(name, _FAMILIES)}")
    return _FAMILIES[name]


def _suggest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    nearest = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    question = f"did you mean '{nearest[0]}'? " if nearest else ""
    return f": {question}choose one of {', '.join(known)}"
