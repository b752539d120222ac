"""What enters a model and its ministages: shapes and dtypes of tensors, and keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zorselike.errors import ConfigError
from zorselike.runtime.model.nested import map_leaves, map_tensors, tensors_in


@dataclass(frozen=True)
class TensorSpec:
    """A tensor `[rows, *shape_per_row]` and whether its gradient is wanted."""

    shape_per_row: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def __str__(self) -> str:
        shape = ", ".join(["rows", *map(str, self.shape_per_row)])
        return f"{str(self.dtype).removeprefix('torch.')} [{shape}]"


@dataclass(frozen=True)
class Signature:
    """What enters the model or a ministage: a tensor or several, of any number of rows."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, inputs: Tensor | Sequence[Tensor]) -> Signature:
        """The signature of inputs `[rows, ...]`; `ConfigError` for one without dimensions."""
        tensors = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        for i, tensor in enumerate(tensors):
            if not tensor.dim():
                raise ConfigError(f"inputs: tensor {i} has no dimensions; dimension 0 must be rows")
        return cls(tuple(TensorSpec(tuple(t.shape[1:]), t.dtype) for t in tensors))

    def zeros(self, rows: int) -> list[Tensor]:
        """Inputs of so many rows, in host memory: also where torch makes tensors elsewhere just now, as on
        the meta device while a model is built."""
        return [torch.zeros(rows, *t.shape_per_row, dtype=t.dtype, device="cpu") for t in self.tensors]

    def at_positions(self, num_positions: int) -> Signature:
        """The signature of so many positions of the sequence, dimension 1 of every tensor."""
        shapes = [(num_positions, *spec.shape_per_row[1:]) for spec in self.tensors]
        pairs = zip(self.tensors, shapes, strict=True)
        return Signature(tuple(replace(spec, shape_per_row=shape) for spec, shape in pairs))

    def __str__(self) -> str:
        return " and ".join(map(str, self.tensors))


# -- keyword arguments ---------------------------------------------------------------------


@dataclass(frozen=True)
class Broadcast:
    """Marks a keyword argument that every microbatch gets whole, instead of its rows of it."""

    value: Any


@dataclass(frozen=True)
class KwargTensor:
    """A tensor within a keyword argument; `shape` is that of one row if it is cut by rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_rows: bool

    def shape_at(self, rows: int) -> tuple[int, ...]:
        """The whole shape, for a microbatch of `rows` rows."""
        return (rows, *self.shape) if self.has_rows else self.shape


KwargSpecs = Mapping[str, Any]
"""Keyword arguments with a `KwargTensor` in place of each tensor."""


def describe_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a step's keyword arguments look like. Tensors are cut in dimension 0, unless they are
    marked `Broadcast`; other values are passed as they are.

    Raises `ConfigError` for a tensor without dimensions, or tensors inside a container, if they
    are not marked.
    """
    specs = {}
    for name, value in kwargs.items():
        if isinstance(value, Broadcast):
            specs[name] = map_tensors(
                value.value, lambda t: KwargTensor(tuple(t.shape), t.dtype, has_rows=False)
            )
        elif isinstance(value, Tensor):
            if not value.dim():
                raise ConfigError(f"{name}= is a tensor without rows; pass Broadcast({name})")
            specs[name] = KwargTensor(tuple(value.shape[1:]), value.dtype, has_rows=True)
        else:
            refuse_tensors_inside(name, value)
            specs[name] = value
    return specs


def refuse_tensors_inside(name: str, value: Any) -> None:
    """Raises `ConfigError` for a keyword argument that is a container of tensors."""
    if not isinstance(value, Tensor | Broadcast) and tensors_in(value):
        raise ConfigError(
            f"{name}= is a {type(value).__name__} of tensors, which is not cut into rows; pass each "
            "tensor by its own name, or Broadcast(...) if every microbatch gets the whole"
        )


def make_kwargs(specs: KwargSpecs, rows: int) -> dict[str, Any]:
    """Keyword arguments of `rows` rows as described; zeros for tensors."""

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, KwargTensor):
            return leaf
        return torch.zeros(leaf.shape_at(rows), dtype=leaf.dtype, device="cpu")

    return {name: map_leaves(spec, make) for name, spec in specs.items()}
