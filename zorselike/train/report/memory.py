"""Peak memory of this process, and what a run logs at its start about the memory of all ranks."""

from __future__ import annotations

import resource
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from zorselike.cost.purposes import Purpose
from zorselike.plan.plan import Plan
from zorselike.runtime.memory.host_room import find_host_memory
from zorselike.runtime.memory_report import MemoryReport
from zorselike.text.wording import show_bytes


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
    total = find_host_memory()
    return MemoryPeak(resident, 100 * resident / total if total else 0.0)


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


def describe_deferral(plan: Plan, reports: Iterable[MemoryReport], *, in_fp16: bool) -> str:
    """One line on why updates wait for the end of the step, and what is kept until then."""
    why = (
        "float16 skips a step as a whole if a gradient of it overflows"
        if in_fp16
        else 'max_norm clips by the norm of all gradients (max_norm = 0 or clip = "ministage" would not)'
    )
    kept = ", ".join(
        f"group {group} {_describe_kept(members)}" for group, members in _by_group(plan, reports).items()
    )
    return (
        f"updates wait for all gradients of a step, since {why}; until then each rank keeps those of "
        f"all its ministages: {kept}"
    )


def describe_fullest(plan: Plan, reports: Iterable[MemoryReport]) -> str:
    """For each group, the report of the rank with the highest planned device memory."""
    fullest = (
        max(members, key=lambda report: report.device_planned_bytes)
        for members in _by_group(plan, reports).values()
    )
    return "\n".join(["memory after the first step, of the fullest rank of each group:", *map(str, fullest)])


def _by_group(plan: Plan, reports: Iterable[MemoryReport]) -> dict[int, list[MemoryReport]]:
    members: defaultdict[int, list[MemoryReport]] = defaultdict(list)
    for report in reports:
        members[plan.group_of_rank[report.rank]].append(report)
    return dict(sorted(members.items()))


def _describe_kept(members: Iterable[MemoryReport]) -> str:
    """Reduced gradients of the rank that has most of them."""
    lines = [line for report in members for line in report.lines if line.purpose == Purpose.GRADIENT_SHARDS]
    on_host = max(line.host_planned or 0 for line in lines)
    on_device = max(line.device_planned or 0 for line in lines)
    where = "in host memory" if on_host else "on the device"
    return f"{show_bytes(on_host or on_device)} {where}"
