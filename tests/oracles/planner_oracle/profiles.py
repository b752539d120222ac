"""Profiles drawn at random, as measured on devices that reach some of their peak."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from zorselike.cost.catalogue import find_device
from zorselike.cost.profile import LayerTimes, Overheads, Profile, Source, UpdateTime
from zorselike.plan.workload import Workload

ROWS = (1, 2, 4, 8, 16)
_SOURCE = Source("measured", note="drawn at random")


def draw_profile(rng: random.Random, workload: Workload, types: Sequence[str], *, most_rows: bool) -> Profile:
    """Times of every kind of layer, or of `layer` alone, on every type: a start, and a slope that falls
    while the device fills; some measurements are off by some percent.

    Args:
        most_rows: whether some devices are found to run out of memory beyond some microbatch.
    """
    kinds = [name for name in workload.kinds if name == "layer" or rng.random() < 0.8]
    layers = [_draw_times(rng, workload, kind, device, most_rows) for device in types for kind in kinds]
    return Profile(
        model=workload.model,
        layers=tuple(layers),
        updates=tuple(
            UpdateTime(
                device=device,
                dtype=workload.dtype,
                seconds_per_parameter=30 / find_device(device).memory_bandwidth_bytes_per_s,
                seconds_per_call=1e-4,
                source=_SOURCE,
            )
            for device in types
            if rng.random() < 0.8
        ),
        overheads=draw_overheads(rng),
    )


def _draw_times(
    rng: random.Random, workload: Workload, name: str, device: str, most_rows: bool
) -> LayerTimes:
    kind = workload.kinds[name]
    peak = max(find_device(device).peak_flops.values())
    row_s = kind.forward_flops_per_row / (rng.uniform(0.2, 0.6) * peak)
    start_s, noise = rng.uniform(0.0, 1.5) * row_s + 5e-5, rng.choice([0.0, 0.03])
    measured = ((start_s + rows * row_s) * (1 + rng.uniform(-noise, noise)) for rows in ROWS)
    forward_s = tuple(accumulate(measured, max))
    backward = rng.uniform(1.8, 2.3)
    return LayerTimes(
        kind=name,
        device=device,
        dtype=workload.dtype,
        sequence_length=workload.sequence_length,
        rows=ROWS,
        forward_s=forward_s,
        backward_s=tuple(backward * seconds for seconds in forward_s),
        max_rows=rng.choice([2, 4, 16]) if most_rows and rng.random() < 0.3 else None,
        source=_SOURCE,
    )


def draw_overheads(rng: random.Random) -> Overheads:
    """None, or some of each."""
    if rng.random() < 0.5:
        return Overheads()
    return Overheads(
        action_s=tuple((kind, rng.uniform(2e-5, 3e-4)) for kind in ("F", "B", "SEND_F", "RECV_F")),
        overlap_slowdown=rng.choice([1.0, 1.05, 1.2]),
        context_bytes=rng.choice([0, 400_000_000, 1_000_000_000]),
        allocator_share=rng.choice([0.0, 0.05]),
        source=_SOURCE,
    )
