"""Weights of a layer in pieces, each an FSDP2 module over the ranks that hold it.

T is the largest degree of a group: a cut weight has T pieces, and a rank of a replica of degree t holds
T / t of them. A piece's mesh is a plain list of its holders, one rank a replica, so degrees may differ. The
layer's call passes through its pieces before it computes: FSDP2's hooks of each then stand round the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zorselike.plan.pieces import Cut
from zorselike.runtime.tensor_parallel.dropout import drop_columns, drop_positions, find_between
from zorselike.runtime.tensor_parallel.products import (
    CutByColumns,
    CutByRows,
    SummedRows,
    cut_linear,
    sum_after,
)
from zorselike.runtime.tensor_parallel.sequence import OwnPositions
from zorselike.runtime.tensor_parallel.styles import Block, Blocks


@dataclass(frozen=True)
class HeldPiece:
    """One of the pieces that a rank holds of every layer of its group."""

    number: int
    mesh: DeviceMesh
    """Of its holders."""
    counts: bool
    """Whether this rank is its first holder."""


@dataclass(frozen=True)
class TensorParallel:
    """How one rank of a group with replicas holds and computes layers."""

    blocks: Blocks
    cuts: Mapping[str, Cut]
    pieces: tuple[HeldPiece, ...]
    positions: OwnPositions | None
    """None for a rank that is a replica alone: it has all pieces and all positions."""


class PartOf(NamedTuple):
    """What a parameter that is a piece belongs to."""

    name: str
    """Of the whole parameter."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    place: int
    """Of this rank's pieces, which."""
    counts: bool
    """Whether this rank is its first holder."""


class Piece(nn.Module):
    """Parts of a layer's weights. What it computes is what it stands round."""

    def __init__(self, layer: str, held: HeldPiece, place: int) -> None:
        """`layer`: whose it is; `place`: of this rank's pieces, which."""
        super().__init__()
        self._layer, self.held, self._place = layer, held, place
        self.names: dict[str, str] = {}
        """Global names of its parameters, by theirs here."""
        self.parts: dict[str, PartOf] = {}
        """What they are parts of, by global name."""

    def add(self, name: str, part: nn.Parameter, shape: tuple[int, ...]) -> str:
        """Takes a part of the parameter of that global name and shape; how it is called here."""
        module, _, kind = name.rpartition(".")
        key = name.removeprefix(f"{self._layer}.").replace(".", "_")  # The same in every layer.
        self.register_parameter(key, part)
        self.names[key] = f"{module}.piece{self.held.number}.{kind}"
        self.parts[self.names[key]] = PartOf(name, shape, self._place, self.held.counts)
        return key

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a piece is called by its layer")


def cut_layer(layer: nn.Module, name: str, parallel: TensorParallel) -> list[Piece]:
    """Takes the cut weights out of a layer, all of which have values, and returns this rank's pieces of them,
    which become its submodules."""
    pieces = [Piece(name, held, place) for place, held in enumerate(parallel.pieces)]
    local, positions = partial(_submodule, layer, name), parallel.positions
    for block in parallel.blocks[name]:
        for linear in block.columns:
            for fqn in (linear.base, *linear.cut_adapters("columns")):
                keys = _take(local(fqn), fqn, pieces, parallel.cuts, ("weight", "bias"))
                cut_linear(local(fqn), CutByColumns, pieces, *keys)
        for linear in block.rows:
            for fqn in (linear.base, *linear.cut_adapters("rows")):
                keys = _take(local(fqn), fqn, pieces, parallel.cuts, ("weight",))
                cut_linear(local(fqn), CutByRows if linear.adapters else SummedRows, pieces, *keys)
            called = local(linear.name)
            if linear.adapters:
                base = local(linear.base)
                called.forward = partial(sum_after, called.forward, base, positions)
            else:
                called.cut_positions = positions  # type: ignore[assignment]
            for dropout in map(local, linear.dropouts):
                if isinstance(dropout, nn.Dropout):
                    edges = parallel.cuts[f"{linear.base}.weight"].edges
                    own = edges[pieces[0].held.number], edges[pieces[-1].held.number + 1]
                    dropped = partial(drop_columns, dropout, own, edges[-1])
                    dropout.forward = dropped  # type: ignore[method-assign]
        if positions is not None:
            local(block.name).register_forward_pre_hook(positions.gather_hidden, with_kwargs=True)
    for _, dropout in find_between(layer, [local(block.name) for block in parallel.blocks[name]]):
        if positions is not None:
            dropped = partial(drop_positions, dropout, positions)
            dropout.forward = dropped  # type: ignore[method-assign]
    for piece in pieces:
        layer.add_module(f"piece{piece.held.number}", piece)
    return pieces


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of what a model's state has, by name: weights that were taken out of layers as they were."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, Piece):
            for key in module.state_dict():
                del shapes[f"{name}.{key}"]
            shapes |= {part.name: part.shape for part in module.parts.values()}
    return shapes


def blocks_of(blocks: Blocks, layers: Iterable[str]) -> list[Block]:
    """All blocks of some layers."""
    return [block for layer in layers for block in blocks.get(layer, ())]


def _submodule(layer: nn.Module, name: str, fqn: str) -> nn.Module:
    return layer.get_submodule(fqn.removeprefix(f"{name}."))


def _take(
    linear: nn.Module, fqn: str, pieces: list[Piece], cuts: Mapping[str, Cut], kinds: tuple[str, ...]
) -> tuple[str, str | None]:
    keys: dict[str, str] = {}
    for kind in kinds:
        whole = linear._parameters.get(kind)
        if whole is None:
            continue
        cut = cuts[f"{fqn}.{kind}"]
        for piece in pieces:
            start, stop = cut.edges[piece.held.number], cut.edges[piece.held.number + 1]
            part = whole.detach().narrow(cut.dim, start, stop - start)
            copy = part.clone(memory_format=torch.contiguous_format)
            parameter = nn.Parameter(copy, requires_grad=whole.requires_grad)
            keys[kind] = piece.add(f"{fqn}.{kind}", parameter, tuple(whole.shape))
        del linear._parameters[kind]
        if kind == "bias":
            linear.register_parameter("bias", None)
    return keys["weight"], keys.get("bias")
