"""A model whose layers weigh, keep and pass on what a workload says, and take as long as they are told.

A sleeping layer holds real parameters, returns real tensors of the stated size and keeps a real tensor
for its backward; only the time is slept. A computing layer multiplies matrices instead.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, Profile, Source, UpdateTime
from zorselike.plan.workload import LayerKind, Workload

from ..bench.forked import run_forked
from ..report import num_cores
from .noise import straighten

CALIBRATED_ROWS = (1, 2, 4, 8, 12, 16)
REPEATS = 7


def pin(rank: int) -> None:
    """Gives this process one core of its own, while ranks are no more than cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def calibrate(workload: Workload, repeats: Mapping[str, int]) -> Profile:
    """A profile of computing layers on device types that multiply so often. As many at once as there are
    cores, as in a run; the parent does not compute, ranks that are forked from it do."""
    types = list(repeats)
    measured = []
    for first in range(0, len(types), num_cores()):
        together = [repeats[device] for device in types[first : first + num_cores()]]
        measured += run_forked(_time_layer, len(together), workload, together)
    source = Source("measured", note="alone on its core, before any run")
    layers = tuple(
        LayerTimes(
            kind=kind,
            device=device,
            dtype=workload.dtype,
            sequence_length=workload.sequence_length,
            rows=CALIBRATED_ROWS,
            forward_s=straighten(forward_s),
            backward_s=straighten(backward_s),
            source=source,
        )
        for device, (forward_s, backward_s, _) in zip(types, measured, strict=True)
        for kind in workload.kinds
    )
    updates = tuple(
        UpdateTime(device=device, dtype=workload.dtype, seconds_per_parameter=update_s, source=source)
        for device, (_, _, update_s) in zip(types, measured, strict=True)
    )
    return Profile(model=workload.model, layers=layers, updates=updates)


def _time_layer(rank: int, workload: Workload, repeats: list[int]) -> tuple[list[float], list[float], float]:
    pin(rank)
    kind = next(iter(workload.kinds.values()))
    layer = ComputingLayer(kind, EmulatedDevice(None, repeats=repeats[rank]))
    forward_s, backward_s = [], []
    for rows in CALIBRATED_ROWS:
        x = torch.ones(rows, kind.input_elements_per_row, requires_grad=True)
        dist.barrier()
        passes = [_time_pass(layer, x) for _ in range(REPEATS)]
        forward_s.append(statistics.median(forward for forward, _ in passes))
        backward_s.append(statistics.median(backward for _, backward in passes))
    return forward_s, backward_s, _time_update(layer)


def _time_pass(layer: ComputingLayer, x: torch.Tensor) -> tuple[float, float]:
    """Forward and backward, in processor seconds: what others do on the machine is not in them."""
    x.grad, grad = None, torch.ones_like(x)
    begin_s = time.thread_time()
    y = layer(x)
    middle_s = time.thread_time()
    torch.autograd.backward(y, grad)
    return middle_s - begin_s, time.thread_time() - middle_s


def _time_update(layer: ComputingLayer) -> float:
    """Processor seconds of an update for each parameter."""
    optimizer = SleepingAdamW(list(layer.named_parameters()), layer.device)
    seconds = []
    for _ in range(REPEATS):
        begin_s = time.thread_time()
        optimizer.step()
        seconds.append(time.thread_time() - begin_s)
    return statistics.median(seconds) / layer.weight.numel()


COMPUTE_WIDTH = 512
"""Width of what computing layers multiply."""


class EmulatedDevice:
    """The device that one rank pretends to be."""

    def __init__(
        self, clock: LayerTimeModel | None, device_type: str = "", *, repeats: int = 1, degree: int = 1
    ) -> None:
        """`clock`: what layers and updates sleep; None: nothing does. `repeats`: how often computing layers
        multiply, so that a device of the same machine can be slower. `degree`: ranks of its tensor-parallel
        replica."""
        self._clock, self._type, self.repeats, self._degree = clock, device_type, repeats, degree
        self.is_awake = True
        """Whether nothing sleeps: for the first step, which sets everything up."""

    def __deepcopy__(self, memo: dict[int, Any]) -> EmulatedDevice:
        return self  # A copied layer runs on the same device.

    def compute(self, kind: str, num_rows: int, *, backward: bool) -> None:
        """Spends the time of a microbatch in one layer; one that is recomputed runs its forward again."""
        if self._clock is not None and not self.is_awake:
            find = self._clock.backward_s if backward else self._clock.forward_s
            if kind == "layer":
                time.sleep(find(kind, self._type, num_rows, "none", self._degree))
            else:  # A head has its rank's positions, an embedding all.
                share = self._degree if kind == "head" else 1
                time.sleep(find(kind, self._type, num_rows, "none") / share)

    def update(self, num_parameters: int) -> None:
        """Spends the time of an optimizer's update."""
        if self._clock is not None and not self.is_awake:
            time.sleep(self._clock.update_s(self._type, num_parameters))


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


def make_rows(workload: Workload, num_inputs: int, num_targets: int) -> tuple[Tensor | None, Tensor | None]:
    """So many rows of the first layer's input and of the last one's output; the numbers do not matter."""
    (_, first), (_, last) = workload.layers[0], workload.layers[-1]
    width, height = workload.kinds[first].input_elements_per_row, workload.kinds[last].output_elements_per_row
    return (
        torch.ones(num_inputs, width) if num_inputs else None,
        torch.ones(num_targets, height) if num_targets else None,
    )
