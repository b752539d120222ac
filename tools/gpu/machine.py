"""What the machine can do at best: copies between host and device, and matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from .job import Job
from .trainers import device_of

_COPY_BYTES = 256 * 2**20
_COPIES = 16
_PRODUCTS = 30


def measure_machine(job: Job) -> dict[str, Any]:
    """Bytes a second to and from the device, alone and at once (pinned buffers of 256 MiB, one stream each),
    and FLOP/s of bf16 products by shape. On a CPU there are no links."""
    device, shape = device_of(job), job.shape
    num_tokens = shape.sequence * shape.microbatch_rows
    shapes = [
        (num_tokens, shape.dim, shape.dim),
        (num_tokens, shape.dim, shape.ffn_hidden),
        (8192, 8192, 8192),
    ]
    if device.type == "cpu":
        rates = {"256x256x256": _measure_product((256, 256, 256), device, 2)}
        return {"links": {}, "matmuls": rates, "device": "CPU", "device_bytes": 0}
    return {
        "links": _measure_links(device),
        "matmuls": {"x".join(map(str, own)): _measure_product(own, device, _PRODUCTS) for own in shapes},
        "device": torch.cuda.get_device_name(device),
        "device_bytes": torch.cuda.get_device_properties(device).total_memory,
        "cuda": torch.version.cuda,
    }


def _measure_links(device: torch.device) -> dict[str, float]:
    host = [torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    up = (streams[0], lambda: there[0].copy_(host[0], non_blocking=True))
    down = (streams[1], lambda: host[1].copy_(there[1], non_blocking=True))
    _time_copies([up, down])
    seconds = [*_time_copies([up]), *_time_copies([down]), *_time_copies([up, down])]
    names = ("to_device", "to_host", "both_to_device", "both_to_host")
    return {name: _COPIES * _COPY_BYTES / own for name, own in zip(names, seconds, strict=True)}


def _time_copies(copies: list[tuple[torch.cuda.Stream, Callable[[], object]]]) -> list[float]:
    """Seconds that each stream needs for its copies, all started together."""
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in copies]
    for (stream, _), (begin, _) in zip(copies, events, strict=True):
        begin.record(stream)
    for _ in range(_COPIES):
        for stream, copy in copies:
            with torch.cuda.stream(stream):
                copy()
    for (stream, _), (_, end) in zip(copies, events, strict=True):
        end.record(stream)
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _measure_product(shape: tuple[int, int, int], device: torch.device, number: int) -> float:
    """FLOP/s of one shape; random numbers, since constant ones multiply faster on a GPU."""
    rows, inner, columns = shape
    a = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    b = torch.randn(inner, columns, device=device, dtype=torch.bfloat16)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for repeats in (3, number):
        wait()
        begin_s = time.perf_counter()
        for _ in range(repeats):
            a @ b
        wait()
    return 2 * rows * inner * columns * number / (time.perf_counter() - begin_s)
