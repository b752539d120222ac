"""A zero gradient for every parameter: how a rank takes part in a reduction without computing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ZeroGradientAnchor(torch.autograd.Function):
    """The identity on its first argument whose backward gives all others a zero gradient.

    Unlike `x + sum(p.sum() * 0)` it reads no parameter, so it costs nothing and neither
    overflows in half precision nor spreads a non-finite weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return x.clone() if x.numel() == 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        zeros = tuple(_zero_grad(p) if p.requires_grad else None for p in ctx.parameters)
        return (grads[0], *zeros)


def _zero_grad(parameter: Tensor) -> Tensor | None:
    """A zero gradient without memory; None where a gradient is there already."""
    if parameter.grad is not None:
        return None
    return parameter.new_zeros(()).expand_as(parameter)


def _apply(x: Tensor, *parameters: Tensor) -> Tensor:
    anchored: Tensor = ZeroGradientAnchor.apply(x, *parameters)  # type: ignore[no-untyped-call]
    return anchored


def anchor_zero_gradients(x: Any, parameters: list[Tensor]) -> Any:
    """`x` (a tensor, or a tuple whose first floating-point tensor is taken) tied to `parameters`."""
    if not parameters:
        return x
    if isinstance(x, Tensor):
        return _apply(x, *parameters)
    position = next(i for i, entry in enumerate(x) if isinstance(entry, Tensor) and entry.is_floating_point())
    anchored = _apply(x[position], *parameters)
    entries = (*x[:position], anchored, *x[position + 1 :])
    return type(x)(*entries) if hasattr(x, "_fields") else type(x)(entries)
