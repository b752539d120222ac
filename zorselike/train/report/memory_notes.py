"""What a run logs about memory at its start, from the reports of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from zorselike.cost.purposes import Purpose
from zorselike.plan.plan import Plan
from zorselike.runtime.memory.report import MemoryReport
from zorselike.text.wording import show_bytes


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
