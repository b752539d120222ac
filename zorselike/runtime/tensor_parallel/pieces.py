"""Weights of a layer in pieces, each an FSDP2 module over the ranks that hold it.

T is the largest degree of a group: a cut weight has T pieces, and a rank of a replica of degree t holds
T / t of them. A piece's mesh is a plain list of its holders, one rank a replica, so degrees may differ. The
layer's call passes through its pieces before it computes: FSDP2's hooks of each then stand round the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zorselike.plan.pieces import Cut
from zorselike.runtime.model.decoder_probe import hidden_states, with_hidden_states
from zorselike.runtime.tensor_parallel.dropout import drop_of_whole
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

    def __init__(self, held: HeldPiece, place: int) -> None:
        """`place`: of this rank's pieces, which."""
        super().__init__()
        self.held, self._place = held, place
        self.names: dict[str, str] = {}
        """Global names of its parameters, by theirs here."""
        self.parts: dict[str, PartOf] = {}
        """What they are parts of, by global name."""

    def add(self, name: str, part: nn.Parameter, shape: tuple[int, ...]) -> str:
        """Takes a part of the parameter of that global name and shape; how it is called here."""
        module, _, kind = name.rpartition(".")
        key = name.replace(".", "_")
        self.register_parameter(key, part)
        self.names[key] = f"{module}.piece{self.held.number}.{kind}"
        self.parts[self.names[key]] = PartOf(name, shape, self._place, self.held.counts)
        return key

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a piece is called by its layer")


def cut_layer(layer: nn.Module, name: str, parallel: TensorParallel) -> list[Piece]:
    """Takes the cut weights out of a layer, all of which have values, and returns this rank's pieces of them,
    which become its submodules."""
    pieces = [Piece(held, place) for place, held in enumerate(parallel.pieces)]
    for block in parallel.blocks[name]:
        local = partial(_submodule, layer, name)
        for linear in block.columns:
            for fqn in (linear.base, *linear.cut_adapters("columns")):
                cut = local(fqn)
                keys = _take(cut, fqn, pieces, parallel.cuts, ("weight", "bias"))
                cut.forward = partial(_columns, pieces, *keys)
        for linear in block.rows:
            for fqn in (linear.base, *linear.cut_adapters("rows")):
                cut = local(fqn)
                (key, _) = _take(cut, fqn, pieces, parallel.cuts, ("weight",))
                cut.forward = partial(_rows, pieces, key)
            for dropout in map(local, linear.dropouts):
                if isinstance(dropout, nn.Dropout):
                    edges = parallel.cuts[f"{linear.base}.weight"].edges
                    own = edges[pieces[0].held.number], edges[pieces[-1].held.number + 1]
                    dropped = partial(drop_of_whole, dropout, own, edges[-1])
                    dropout.forward = dropped  # type: ignore[method-assign]
            called = local(linear.name)  # With its adapters: one sum.
            called.forward = partial(_sum_parts, called.forward, local(linear.base), parallel.positions)
        if parallel.positions is not None:
            gather = partial(_gather, parallel.positions)
            local(block.name).register_forward_pre_hook(gather, with_kwargs=True)
    for piece in pieces:
        layer.add_module(f"piece{piece.held.number}", piece)
    return pieces


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
    _show_weight(linear, pieces[0], keys["weight"])
    return keys["weight"], keys.get("bias")


def _show_weight(linear: nn.Module, piece: Piece, key: str) -> None:
    """Whoever asks a layer for its weight's dtype or device, as peft does, is shown a part of it."""
    shown = property(lambda _: getattr(piece, key))
    linear.__class__ = type(type(linear).__name__, (type(linear),), {"weight": shown})


def _columns(pieces: list[Piece], weight: str, bias: str | None, x: Tensor) -> Tensor:
    found = [F.linear(x, getattr(p, weight), None if bias is None else getattr(p, bias)) for p in pieces]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _rows(pieces: list[Piece], weight: str, x: Tensor) -> Tensor:
    weights = [getattr(piece, weight) for piece in pieces]
    parts = torch.split(x, [w.shape[1] for w in weights], dim=-1)
    y = F.linear(parts[0], weights[0])
    for part, w in zip(parts[1:], weights[1:], strict=True):
        y = y + F.linear(part, w)
    return y


def _sum_parts(
    compute: Callable[..., Tensor], linear: nn.Module, positions: OwnPositions | None, x: Tensor
) -> Tensor:
    y = compute(x)
    if positions is not None:
        y = positions.sum_to_own(y)
    bias = linear._parameters.get("bias")
    return y if bias is None else y + bias


def _gather(
    positions: OwnPositions, _: nn.Module, args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return with_hidden_states(args, kwargs, positions.gather(hidden_states(args, kwargs)))
