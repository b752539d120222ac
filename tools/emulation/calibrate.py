"""Times of layers that really compute, measured bare on this machine before any scored run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from zorselike.cost.profile import LayerTimes, Profile, Source, UpdateTime
from zorselike.plan.workload import Workload

from ..bench.forked import run_forked
from ..report import num_cores
from .model import ComputingLayer, EmulatedDevice, SleepingAdamW
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
