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
    """Bytes a second to and from the device, alone and at once, and FLOP/s of bf16 products.

    `to_device`, `to_host`: pinned buffers of 256 MiB, one stream each. `both_to_device`,
    `both_to_host`: the same while the other direction is busy. `matmul`: the best of the shapes in
    `matmuls`. On a CPU there are no links.
    """
    device = device_of(job)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    links = _measure_links(device) if device.type == "cuda" else {}
    shapes = _product_shapes(job)
    rates = {"x".join(map(str, shape)): _measure_product(shape, device) for shape in shapes}
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    versions = {"torch": str(torch.__version__), "cuda": torch.version.cuda or ""}
    return {
        "links": links,
        "matmuls": rates,
        "matmul": max(rates.values()),
        "device": name,
        "device_bytes": total,
        "versions": versions,
    }


def _measure_links(device: torch.device) -> dict[str, float]:
    host = [torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def to_device() -> None:
        there[0].copy_(host[0], non_blocking=True)

    def to_host() -> None:
        host[1].copy_(there[1], non_blocking=True)

    _time_copies([(streams[0], to_device), (streams[1], to_host)], num_copies=2)
    (up_s,) = _time_copies([(streams[0], to_device)])
    (down_s,) = _time_copies([(streams[1], to_host)])
    both_up_s, both_down_s = _time_copies([(streams[0], to_device), (streams[1], to_host)])
    moved = _COPIES * _COPY_BYTES
    return {
        "to_device": moved / up_s,
        "to_host": moved / down_s,
        "both_to_device": moved / both_up_s,
        "both_to_host": moved / both_down_s,
    }


def _time_copies(
    copies: list[tuple[torch.cuda.Stream, Callable[[], None]]], num_copies: int = _COPIES
) -> list[float]:
    """Seconds that each stream needs for its copies, all started together."""
    torch.cuda.synchronize()
    begins = [torch.cuda.Event(enable_timing=True) for _ in copies]
    ends = [torch.cuda.Event(enable_timing=True) for _ in copies]
    for (stream, _), begin in zip(copies, begins, strict=True):
        begin.record(stream)
    for _ in range(num_copies):
        for stream, copy in copies:
            with torch.cuda.stream(stream):
                copy()
    for (stream, _), end in zip(copies, ends, strict=True):
        end.record(stream)
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in zip(begins, ends, strict=True)]


def _product_shapes(job: Job) -> list[tuple[int, int, int]]:
    if job.device == "cpu":
        return [(256, 256, 256)]
    shape = job.shape
    num_tokens = shape.sequence * shape.microbatch_rows
    return [(num_tokens, shape.dim, shape.dim), (num_tokens, shape.dim, shape.ffn_hidden), (8192, 8192, 8192)]


def _measure_product(shape: tuple[int, int, int], device: torch.device) -> float:
    """FLOP/s of one shape; random numbers, since constant ones multiply faster on a GPU."""
    rows, inner, columns = shape
    a = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    b = torch.randn(inner, columns, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ b
    num_products = _PRODUCTS if device.type == "cuda" else 2
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(num_products):
        a @ b
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 2 * rows * inner * columns * num_products / (time.perf_counter() - begin_s)
