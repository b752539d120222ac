"""A model whose layers weigh, keep and pass on what a workload says, and take as long as they are told.

A sleeping layer holds real parameters, returns real tensors of the stated size and keeps a real tensor
for its backward; only the time is slept. A computing layer multiplies matrices instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import Profile
from zorselike.plan.workload import LayerKind, Workload

Seconds = Callable[[str, int, bool], float]
"""`(layer kind, rows, whether backward) -> seconds`; without recomputation."""

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

COMPUTE_WIDTH = 512
"""Width of what computing layers multiply."""


class DeviceTimes:
    """What emulated devices sleep: seconds of layers and updates by device type, as the cost model reads
    them."""

    def __init__(self, profile: Profile, workload: Workload) -> None:
        """Raises `ProfileError` if the profile is for another workload."""
        self._clock = LayerTimeModel(profile, workload)

    def layer_s(self, device_type: str, kind: str, num_rows: int, backward: bool) -> float:
        """One pass of one layer; a layer that is recomputed runs its forward again by itself."""
        find = self._clock.backward_s if backward else self._clock.forward_s
        return find(kind, device_type, num_rows, "none")

    def update_s(self, device_type: str, num_parameters: int) -> float:
        return self._clock.update_s(device_type, num_parameters)


class EmulatedDevice:
    """The device that one rank pretends to be."""

    def __init__(self, seconds: Seconds, update_s: Callable[[int], float], *, repeats: int = 1) -> None:
        """`update_s`: seconds of an optimizer update against parameters; `repeats`: how often computing
        layers multiply, so that a device of the same machine can be slower."""
        self._seconds = seconds
        self._update_s = update_s
        self.repeats = repeats
        self.is_awake = True
        """Whether nothing sleeps: for the first step, which sets everything up."""

    def __deepcopy__(self, memo: dict[int, Any]) -> EmulatedDevice:
        return self  # A copied layer runs on the same device.

    def compute(self, kind: str, num_rows: int, *, backward: bool) -> None:
        """Spends the time of a microbatch in one layer."""
        if not self.is_awake:
            time.sleep(self._seconds(kind, num_rows, backward))

    def update(self, num_parameters: int) -> None:
        """Spends the time of an optimizer's update."""
        if not self.is_awake:
            time.sleep(self._update_s(num_parameters))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SleepingLayer) -> Tensor:
        ctx.layer, ctx.entered, ctx.weighs = layer, (x.shape, x.dtype, x.device), weight.shape
        num_rows, kind = x.shape[0], layer.kind
        if not x.is_meta:
            layer.device.compute(kind.name, num_rows, backward=False)
        ctx.save_for_backward(x.new_empty(num_rows * kind.activation_bytes_per_row, dtype=torch.uint8))
        return weight.new_zeros(num_rows, kind.output_elements_per_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (grad,) = grads
        _ = ctx.saved_tensors  # On the device again, wherever they were.
        layer: SleepingLayer = ctx.layer
        layer.device.compute(layer.kind.name, grad.shape[0], backward=True)
        shape, dtype, device = ctx.entered
        entering = torch.zeros(shape, dtype=dtype, device=device) if ctx.needs_input_grad[0] else None
        return entering, grad.new_zeros(ctx.weighs), None


class SleepingLayer(nn.Module):
    """`[rows, input elements]` to `[rows, output elements]`, in the time that its device says."""

    def __init__(self, kind: LayerKind, device: EmulatedDevice) -> None:
        super().__init__()
        self.kind, self.device = kind, device
        self.weight = nn.Parameter(torch.zeros(kind.num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return slept


class ComputingLayer(nn.Module):
    """`[rows, elements]` to the same by as many matrix products as its device repeats."""

    def __init__(self, kind: LayerKind, device: EmulatedDevice) -> None:
        super().__init__()
        self.kind, self.device = kind, device
        self.weight = nn.Parameter(torch.randn(COMPUTE_WIDTH, COMPUTE_WIDTH) / COMPUTE_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, COMPUTE_WIDTH)
        for _ in range(self.device.repeats):
            h = torch.tanh(h @ self.weight)
        return h.view_as(x) + x


def build_model(workload: Workload, device: EmulatedDevice, *, computes: bool = False) -> nn.Sequential:
    """The workload's modules under their names, nested as the dots in these say."""
    root = nn.Sequential()
    make = ComputingLayer if computes else SleepingLayer
    for name, kind in workload.layers:
        *outer, last = name.split(".")
        parent: nn.Module = root
        for part in outer:
            if part not in parent._modules:
                parent.add_module(part, nn.Sequential())
            parent = parent.get_submodule(part)
        parent.add_module(last, make(workload.kinds[kind], device))
    return root


class SleepingAdamW(torch.optim.AdamW):
    """AdamW that takes as long as a device's update of so many parameters."""

    def __init__(self, named_parameters: list[tuple[str, nn.Parameter]], device: EmulatedDevice) -> None:
        super().__init__(named_parameters, lr=1e-4)
        self._device = device
        self._num_parameters = sum(_num_local(parameter) for _, parameter in named_parameters)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._device.update(self._num_parameters)
        super().step()


def _num_local(parameter: nn.Parameter) -> int:
    """Elements that this rank holds."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel())


@dataclass(frozen=True)
class Rows:
    """What a rank feeds and compares with; the numbers do not matter."""

    inputs: Tensor | None
    targets: Tensor | None


def make_rows(workload: Workload, num_inputs: int, num_targets: int) -> Rows:
    """So many rows of the first layer's input and of the last one's output."""
    (_, first), (_, last) = workload.layers[0], workload.layers[-1]
    dtype = DTYPES[workload.dtype]
    width, height = workload.kinds[first].input_elements_per_row, workload.kinds[last].output_elements_per_row
    return Rows(
        torch.ones(num_inputs, width, dtype=dtype) if num_inputs else None,
        torch.ones(num_targets, height, dtype=dtype) if num_targets else None,
    )


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is a sum over rows."""
    return (outputs.float() - targets.float()).square().sum() / targets.shape[-1]


def count_rows(targets: Tensor) -> int:
    """What the loss is divided by."""
    return targets.shape[0]
