"""Peak memory of this process."""

from __future__ import annotations

import os
import resource
import sys
from typing import NamedTuple

import torch


class MemoryPeak(NamedTuple):
    """Bytes, and their percentage of the memory of the device (for a CPU rank, of the host)."""

    num_bytes: int
    percent: float


def read_peak(device: torch.device) -> MemoryPeak:
    """Peak of reserved GPU memory since `reset_peak`; for a CPU rank of resident memory since its start."""
    if device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(device)
        return MemoryPeak(reserved, 100 * reserved / torch.cuda.get_device_properties(device).total_memory)
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MemoryPeak(resident, 100 * resident / total)


def read_footprint(device: torch.device) -> int | None:
    """Bytes that this process needed on its GPU since `reset_peak`: the peak of tensors, and memory outside
    torch's allocator (the CUDA context, libraries, other processes); None for a CPU rank, where nothing
    counts tensors."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    beside = total - free - torch.cuda.memory_reserved(device)
    return torch.cuda.max_memory_allocated(device) + beside


def reset_peak(device: torch.device) -> None:
    """Resets the peak, if the device has one."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def count_out_of_memory(device: torch.device) -> int:
    """How often the allocator ran out of memory, then retried or failed."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0)) if device.type == "cuda" else 0
