"""Seconds of the optimizer's update per parameter and per call."""

from __future__ import annotations

import torch
from torch import nn

from zorselike.cost.profile import Source, UpdateTime
from zorselike.profiler.clock import Clock
from zorselike.runtime.ministage.gradients import HALF

SIZES = {"cuda": (2**20, 2**24), "cpu": (2**18, 2**22)}
"""Parameters of the two updates between which a line is drawn."""


def measure_update(
    device: torch.device, *, type: str, dtype: torch.dtype, repeats: int, source: Source
) -> UpdateTime:
    """AdamW (fused) on fp32 parameters, which in half precision are then rounded into the shards.

    Args:
        type: the device's name in the profile.
        dtype: what layers compute in.
    """
    few, many = SIZES[device.type]
    small, large = (_time_update(device, size, dtype, repeats) for size in (few, many))
    slope = (large - small) / (many - few)
    if slope <= 0:  # Noise; the larger one by itself is nearer to the truth.
        slope = large / many
    return UpdateTime(
        device=type,
        dtype=str(dtype).removeprefix("torch."),
        seconds_per_parameter=slope,
        seconds_per_call=max(0.0, small - slope * few),
        source=source,
    )


def _time_update(device: torch.device, size: int, dtype: torch.dtype, repeats: int) -> float:
    parameter = nn.Parameter(torch.zeros(size, device=device))
    parameter.grad = torch.ones(size, device=device)
    optimizer = torch.optim.AdamW([parameter], lr=1e-5, fused=True)
    shard = torch.empty(size, dtype=dtype, device=device) if dtype in HALF else None

    def update() -> None:
        optimizer.step()
        if shard is not None:
            shard.copy_(parameter.detach())

    return Clock(device).time(update, repeats=repeats, warmups=2)
