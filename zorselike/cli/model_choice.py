"""Which of our models a command is about: by family, flavor and single settings, or by its name.

A model's name, as workloads, plans and profiles carry it, holds all three: `llama 7b num_layers=8`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zorselike.plan.errors import ConfigError

if TYPE_CHECKING:
    from zorselike.models import Decoder, DecoderConfig


@dataclass(frozen=True)
class ModelChoice:
    """One model of `zorselike/models`."""

    family: str
    flavor: str
    overrides: tuple[tuple[str, Any], ...] = ()
    """Single settings that differ from the flavor's."""

    @property
    def name(self) -> str:
        return " ".join([self.family, self.flavor, *(f"{key}={value}" for key, value in self.overrides)])

    def config(self) -> DecoderConfig:
        """Its configuration; raises `ConfigError`, with the nearest word, for what does not exist."""
        from zorselike.models import get_config

        return get_config(self.family, self.flavor, **dict(self.overrides))

    def build(self) -> Decoder:
        """The model on the meta device."""
        import torch

        from zorselike.models import build_model

        with torch.device("meta"):
            return build_model(self.family, self.flavor, **dict(self.overrides))


def choose_model(family: str, flavor: str, overrides: Sequence[str]) -> ModelChoice:
    """From a command line's words; `overrides` are `key=value`. Raises `ConfigError` for other text."""
    return ModelChoice(family, flavor, tuple(sorted(map(_read_override, overrides))))


def parse_model(name: str) -> ModelChoice:
    """The inverse of `ModelChoice.name`; raises `ConfigError` for other names."""
    words = name.split()
    if len(words) < 2:
        raise ConfigError(f"'{name}' is not one of our models, such as 'llama 7b'; give --workload FILE")
    choice = choose_model(words[0], words[1], words[2:])
    try:
        choice.config()
    except ConfigError as error:
        raise ConfigError(f"'{name}' is not one of our models ({error}); give --workload FILE") from None
    return choice


def _read_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigError(f"model: '{text}' is no setting; write it as num_layers=8")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise ConfigError(f"model: {key} = '{value}' is no number, nor True or False") from None
