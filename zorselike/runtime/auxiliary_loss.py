"""Losses of single layers, such as a mixture of experts' for the balance of its experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zorselike.errors import ConfigError

_weight = 0.0
"""Of what is added now. Not by thread: layers are computed again in autograd's."""
_is_in_replica = False


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Lets a layer add to the loss: returns `x`, behind which gradients are those of `loss` too.

    In `pipe.step` parameters follow `result.loss` plus the sum of all that is added, over the whole model
    and batch, divided by `global_batch`. The result does not show it, and elsewhere nothing is added. To be
    called in a layer's `forward`, or by a hook of a module inside the layer.

    Args:
        x: what the layer goes on with, `[rows, ...]`.
        loss: one number, a sum over the rows of `x` in which each row stands for itself; else it would depend
            on the plan's microbatches.

    Raises:
        ConfigError: `loss` is not one number, or a rank of a tensor-parallel replica computes, which has some
            positions of its rows alone.
    """
    if _is_in_replica:
        raise ConfigError(
            "add_loss: a rank of a tensor-parallel replica has some positions of its rows alone: what it "
            "adds is no sum over rows; list single ranks in the plan"
        )
    if loss.dim() != 0:
        raise ConfigError(
            f"add_loss: the loss is a tensor of shape {list(loss.shape)}; give one number, the sum over rows"
        )
    added: Tensor = _Added.apply(x, loss, _weight)  # type: ignore[no-untyped-call]
    return added


@contextmanager
def weighing(weight: float, *, is_in_replica: bool = False) -> Iterator[None]:
    """Inside, what layers add counts so much; in a tensor-parallel replica none may add anything."""
    global _weight, _is_in_replica
    before = _weight, _is_in_replica
    _weight, _is_in_replica = weight, is_in_replica
    try:
        yield
    finally:
        _weight, _is_in_replica = before


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.dtype = weight, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], grads[0].new_full((), ctx.weight, dtype=ctx.dtype), None
