"""Settings as `key=value`, on command lines and in recipes."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from zorselike.errors import ConfigError


def _read_assignment(text: str, where: str) -> tuple[str, Any]:
    """The key and the value, a number or a bool; raises `ConfigError` for anything else, with `where` in
    front."""
    key, equals, value = map(str.strip, text.partition("="))
    if not equals or not key.isidentifier():
        raise ConfigError(f"{where}: '{text}' is not a setting; write it as num_layers=8")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise ConfigError(f"{where}: {key} = '{value}' is neither a number nor True or False") from None


def read_assignments(texts: Iterable[str], where: str) -> tuple[tuple[str, Any], ...]:
    """Several of them, in the order of their keys; raises `ConfigError` for a key that is there twice too."""
    found: dict[str, Any] = {}
    for text in texts:
        key, value = _read_assignment(text, where)
        if key in found:
            raise ConfigError(f"{where}: {key} is given twice; give it once")
        found[key] = value
    return tuple(sorted(found.items()))


def write_assignments(settings: Iterable[tuple[str, Any]]) -> list[str]:
    """The inverse of `read_assignments`."""
    return [f"{key}={value}" for key, value in settings]


def name_model(family: str, flavor: str, settings: Iterable[tuple[str, Any]]) -> str:
    """What workloads, plans, profiles and runs call a built-in model: `llama 7b num_layers=8`."""
    return " ".join([family, flavor, *write_assignments(settings)])
