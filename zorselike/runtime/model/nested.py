"""Nested tuples, named tuples, lists and dictionaries: their entries, and the same nesting of others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same nesting, with `function` of every entry; what contains entries keeps its type."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(map_leaves(entry, function) for entry in value))
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)([map_leaves(entry, function) for entry in value])
    if isinstance(value, dict):
        changed = copy.copy(value)
        for key, entry in value.items():
            changed[key] = map_leaves(entry, function)
        return changed
    return function(value)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same nesting, with `function` of every tensor; other entries stay."""
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def leaves(value: Any) -> Iterator[Any]:
    """The entries, in the order of `map_leaves`."""
    if isinstance(value, tuple | list):
        for entry in value:
            yield from leaves(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from leaves(entry)
    else:
        yield value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among the entries, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
