"""Products of linear layers whose weights are pieces.

A layer that is cut gets another class and keeps what it is called with. Its forward reads the pieces from its
own attributes, so that `torch.compile` takes layers that look alike for one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zorselike.runtime.tensor_parallel.sequence import OwnPositions

if TYPE_CHECKING:
    from zorselike.runtime.tensor_parallel.pieces import Piece


class _CutLinear(nn.Module):
    """What a linear layer becomes."""

    cut_pieces: list[Piece]
    cut_weight: str
    """What they call their parts of its weight."""
    cut_bias: str | None
    """And of its bias, where that is cut."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """For who asks for its dtype or device, as peft does: a part of it."""
        return getattr(self.cut_pieces[0], self.cut_weight)  # type: ignore[no-any-return]


class CutByColumns(_CutLinear):
    """By what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for piece in self.cut_pieces:
            bias = None if self.cut_bias is None else getattr(piece, self.cut_bias)
            found.append(F.linear(x, getattr(piece, self.cut_weight), bias))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


class CutByRows(_CutLinear):
    """By what it takes: gives this rank's part of a sum, without the bias."""

    def forward(self, x: Tensor) -> Tensor:
        weights = [getattr(piece, self.cut_weight) for piece in self.cut_pieces]
        parts = torch.split(x, [weight.shape[1] for weight in weights], dim=-1)
        y = F.linear(parts[0], weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            y = y + F.linear(part, weight)
        return y


class SummedRows(CutByRows):
    """The same with the sum over ranks, and the bias."""

    cut_positions: OwnPositions | None
    """None for a rank that is a replica alone."""

    def forward(self, x: Tensor) -> Tensor:
        return sum_parts(super().forward(x), self, self.cut_positions)


def cut_linear(
    linear: nn.Module, kind: type[_CutLinear], pieces: list[Piece], weight: str, bias: str | None
) -> None:
    """Makes a linear layer, whose weight was taken, compute with pieces of it."""
    linear.__class__ = _mix(kind, type(linear))  # type: ignore[arg-type]
    assert isinstance(linear, _CutLinear)
    linear.cut_pieces, linear.cut_weight, linear.cut_bias = pieces, weight, bias


@cache
def _mix(kind: type[_CutLinear], linear: type[nn.Module]) -> type[nn.Module]:
    return type(linear.__name__, (kind, linear), {})


def sum_parts(own: Tensor, linear: nn.Module, positions: OwnPositions | None) -> Tensor:
    """All ranks' parts, at this rank's positions, with the layer's bias."""
    y = own if positions is None else positions.sum_to_own(own)
    bias = linear._parameters.get("bias")
    return y if bias is None else y + bias


def sum_after(
    compute: Callable[[Tensor], Tensor], linear: nn.Module, positions: OwnPositions | None, x: Tensor
) -> Tensor:
    """What a layer with adapters computes in parts, their parts among them, as one sum."""
    return sum_parts(compute(x), linear, positions)
