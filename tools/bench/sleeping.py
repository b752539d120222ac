"""Layers that sleep as long as an unequal device would compute, beside a tiny real computation.

A dozen ranks then share two cores, and unequal devices are exact: the rank's seconds per row
and layer come from a table. Forward sleeps that, backward twice that.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from second_simulator.actions import compute_s


class Device:
    """The device that a rank pretends to be."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """Seconds per row and layer, forward."""
        self.is_awake = True
        """Whether layers do not sleep: for the first step, which sets everything up."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Device:
        return self  # A copied layer runs on the same device.

    def compute(self, num_rows: int, num_layers: int, *, backward: bool) -> None:
        """Spends the time of one microbatch through some layers."""
        if not self.is_awake:
            time.sleep(compute_s(num_rows, num_layers, self.seconds, backward=backward))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Device, num_layers: int) -> Tensor:
        ctx.device, ctx.num_layers = device, num_layers
        if not x.is_meta:
            device.compute(x.shape[0], num_layers, backward=False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        ctx.device.compute(grad.shape[0], ctx.num_layers, backward=True)
        return grad, None, None


class SleepingLayers(nn.Module):
    """`num_layers` layers in one module: `[rows, hidden]` to the same; sleeps once a pass.

    Weighs `num_layers * hidden * hidden` numbers, so that collectives over it move what so many
    layers would.
    """

    def __init__(self, num_layers: int, hidden: int, device: Device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_layers * hidden, hidden) / hidden)
        self._num_layers = num_layers
        self._device = device

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.shape[-1]
        weight = self.weight.view(self._num_layers, hidden, hidden).mean(0)
        slept: Tensor = _Sleep.apply(  # type: ignore[no-untyped-call]
            x + x @ weight, self._device, self._num_layers
        )
        return slept


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is a sum over rows."""
    return (outputs - targets).square().sum() / targets.shape[-1]


def count_rows(targets: Tensor) -> int:
    """What the loss is divided by."""
    return targets.shape[0]
