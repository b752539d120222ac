"""An emulated model whose layers tensor parallelism can cut: real products in an attention and a feed-forward
network, between which ranks of a replica exchange positions; only time is slept, once a layer and pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zorselike.plan.workload import LayerKind, Workload

from .model import EmulatedDevice

TOKENS = 8
"""Of a row."""
INNER = 2
"""Times as wide as hidden states is what a block makes of them."""
TP_PLAN = {
    "layers.*.attention.up": "colwise",
    "layers.*.attention.down": "rowwise",
    "layers.*.feed_forward.up": "colwise",
    "layers.*.feed_forward.down": "rowwise",
}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: EmulatedDevice, kind: str) -> Tensor:
        ctx.device, ctx.kind = device, kind
        if not x.is_meta:
            device.compute(kind, x.shape[0], backward=False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        ctx.device.compute(ctx.kind, grad.shape[0], backward=True)
        return grad, None, None


class _Block(nn.Module):
    """`[rows, positions, width]` to the same."""

    def __init__(self, width: int, device: EmulatedDevice | None, kind: str) -> None:
        """`device`: whose time is slept here; None: nothing is."""
        super().__init__()
        self.up = nn.Linear(width, INNER * width, bias=False)
        self.down = nn.Linear(INNER * width, width, bias=False)
        self._device, self._kind = device, kind

    def forward(self, h: Tensor) -> Tensor:
        if self._device is not None:
            h = _Sleep.apply(h, self._device, self._kind)  # type: ignore[no-untyped-call]
        out: Tensor = self.down(self.up(h))
        return out


class CutLayer(nn.Module):
    """A layer that sleeps as long as its device says."""

    def __init__(self, kind: LayerKind, device: EmulatedDevice) -> None:
        super().__init__()
        width = kind.input_elements_per_row // TOKENS
        self.attention = _Block(width, device, kind.name)
        self.feed_forward = _Block(width, None, kind.name)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(h)
        out: Tensor = h + self.feed_forward(h)
        return out


class UncutLayer(nn.Module):
    """What stands before or after layers: a weight for each element of a token, and its device's time."""

    def __init__(self, kind: LayerKind, device: EmulatedDevice) -> None:
        super().__init__()
        self._device, self._kind = device, kind.name
        self.weight = nn.Parameter(torch.ones(kind.num_parameters))

    def forward(self, h: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(h, self._device, self._kind)  # type: ignore[no-untyped-call]
        return slept * self.weight


def make_kinds(row_elements: int, flops: dict[str, float]) -> dict[str, LayerKind]:
    """Embedding, layer and head, with what they keep: a product keeps what it takes, fp32."""
    width = row_elements // TOKENS
    num_parameters = {"embedding": width, "layer": 4 * INNER * width**2, "head": width}
    kept = {"embedding": row_elements, "layer": 2 * (1 + INNER) * row_elements, "head": row_elements}
    return {
        name: LayerKind(
            name=name,
            num_parameters=num_parameters[name],
            forward_flops_per_row=own,
            input_elements_per_row=row_elements,
            output_elements_per_row=row_elements,
            activation_bytes_per_row=4 * kept[name],
        )
        for name, own in flops.items()
    }


def build_cut_model(workload: Workload, device: EmulatedDevice) -> nn.Sequential:
    """The workload's modules; rows are `[rows, TOKENS, width]`."""
    inner = nn.Sequential()
    modules = {
        name: (CutLayer if kind == "layer" else UncutLayer)(workload.kinds[kind], device)
        for name, kind in workload.layers
    }
    for name, module in modules.items():
        if name.startswith("layers."):
            inner.add_module(name.removeprefix("layers."), module)
    root = nn.Sequential()
    root.add_module("tok_embeddings", modules["tok_embeddings"])
    root.add_module("layers", inner)
    root.add_module("output", modules["output"])
    return root


def count_tokens(targets: Tensor) -> int:
    """What the loss is divided by."""
    return targets.shape[0] * targets.shape[1]


def make_token_rows(
    workload: Workload, num_inputs: int, num_targets: int
) -> tuple[Tensor | None, Tensor | None]:
    """So many rows of inputs and targets; the numbers do not matter."""
    width = workload.kinds["layer"].input_elements_per_row // TOKENS
    return (
        torch.ones(num_inputs, TOKENS, width) if num_inputs else None,
        torch.ones(num_targets, TOKENS, width) if num_targets else None,
    )
