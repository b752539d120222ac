"""A rank's memory by purpose, planned and measured; and whether the host has room for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zorselike.cost.memory import MinistageBytes, walk_memory
from zorselike.cost.purposes import Purpose
from zorselike.errors import ConfigError
from zorselike.runtime.assembly import Assembly
from zorselike.runtime.memory.host_room import find_host_room
from zorselike.runtime.ministage.ministage import ShardedMinistage
from zorselike.runtime.ministage.optimizer_state import count_moments
from zorselike.runtime.model.layer_inputs import InputBytes
from zorselike.runtime.model.signature import Boundary
from zorselike.schedule.actions import Action, Kind

GIB = 2**30
_UNCOUNTED = (Purpose.GRADIENTS, Purpose.WORKING_SET)
"""Not in the ledger: FSDP2 and autograd allocate and free it."""


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of one purpose; None: not known before the first step, or not counted: activations that
    stay on the device are managed by autograd."""

    purpose: str
    device_planned: int | None
    device_peak: int | None
    host_planned: int | None
    host_peak: int | None

    @property
    def numbers(self) -> tuple[int | None, ...]:
        """Device planned and peak, host planned and peak."""
        return self.device_planned, self.device_peak, self.host_planned, self.host_peak


@dataclass(frozen=True)
class MemoryReport:
    """One rank's memory by purpose, planned from the schedule and found so far; `str` is a table.

    Peaks of purposes come at different times, so that their sum is more than any total.
    """

    rank: int
    lines: tuple[MemoryLine, ...]
    device_planned_bytes: int
    """The most at one time, as planned: without what autograd saves where nothing is recomputed."""
    device_peak_bytes: int | None
    """The most at one time that the CUDA allocator has given out; None on a CPU rank."""
    host_planned_bytes: int
    host_peak_bytes: int

    def __str__(self) -> str:
        total = MemoryLine(
            "all at one time",
            self.device_planned_bytes,
            self.device_peak_bytes,
            self.host_planned_bytes,
            self.host_peak_bytes,
        )
        shown = [line for line in (*self.lines, total) if any(n is not None for n in line.numbers)]
        largest = max((n for line in shown for n in line.numbers if n is not None), default=0)
        unit, unit_bytes = ("GiB", GIB) if largest >= GIB else ("MiB", GIB // 1024)
        titles = ("device planned", "peak", "host planned", "peak")
        head = f"memory of rank {self.rank}, {unit}".ljust(34) + _align(titles)
        return "\n".join([head, *(_format_line(unit_bytes, line) for line in shown), _LEGEND])


_LEGEND = "  (-: not known before the first step, or autograd's and the allocator's affair)"


def _format_line(unit_bytes: int, line: MemoryLine) -> str:
    texts = ["-" if value is None else f"{value / unit_bytes:,.2f}" for value in line.numbers]
    return f"  {line.purpose:<32}" + _align(texts)


def _align(texts: Sequence[str]) -> str:
    return "".join(text.rjust(width) for text, width in zip(texts, (16, 8, 15, 8), strict=True))


def report_memory(
    assembly: Assembly,
    *,
    boundaries: Sequence[Boundary] = (),
    layer_inputs: Sequence[Sequence[InputBytes]] = (),
) -> MemoryReport:
    """The report of this rank. `boundaries` and `layer_inputs` are empty before the first step."""
    compiled, ranks = assembly.compiled, assembly.ranks
    sizes = {
        index: measure_ministage(ministage, assembly, boundaries, layer_inputs)
        for index, ministage in assembly.ministages.items()
    }
    walk = walk_memory(compiled.plan, ranks.rank, compiled.step_actions[ranks.rank], sizes)
    ledger = assembly.resources.memory.ledger
    lines = []
    offload = assembly.resources.activations
    for purpose in walk.device:
        entered = purpose not in _UNCOUNTED
        is_activations = purpose is Purpose.ACTIVATIONS
        known = purpose is not Purpose.WORKING_SET and (
            not is_activations or bool(offload and offload.kept_bytes)
        )
        counted = entered and (not is_activations or offload is not None)
        lines.append(
            MemoryLine(
                purpose,
                walk.device[purpose] if known else None,
                ledger.peak(purpose, "device") if counted else None,
                walk.host[purpose] if known else None,
                ledger.peak(purpose, "host") if entered else None,
            )
        )
    on_gpu = assembly.device.type == "cuda"
    return MemoryReport(
        rank=ranks.rank,
        lines=tuple(lines),
        device_planned_bytes=walk.device_peak_bytes,
        device_peak_bytes=torch.cuda.max_memory_allocated(assembly.device) if on_gpu else None,
        host_planned_bytes=walk.host_peak_bytes,
        host_peak_bytes=sum(ledger.peak(purpose, "host") for purpose in Purpose),
    )


def measure_ministage(
    ministage: ShardedMinistage,
    assembly: Assembly,
    boundaries: Sequence[Boundary],
    layer_inputs: Sequence[Sequence[InputBytes]],
) -> MinistageBytes:
    """The sizes of one of this rank's ministages."""
    sizes, index = ministage.sizes(), ministage.index
    optimizer = assembly.updates.optimizers.get(index)
    found = ministage.state.moment_bytes
    moments = found if found else sizes.trained_bytes * (count_moments(optimizer) if optimizer else 0)
    per_row = max((_bytes_per_row(b) for b in boundaries[index : index + 2]), default=0)
    kept = _kept_bytes_per_row(index, assembly, layer_inputs)
    return MinistageBytes(
        gathered_bytes=ministage.gathered_bytes,
        shard_bytes=sizes.shard_bytes,
        kept_shard_bytes=sizes.kept_shard_bytes,
        gradient_bytes=sizes.gradient_bytes,
        gradient_shard_bytes=sizes.gradient_shard_bytes,
        state_bytes=sizes.master_bytes + moments,
        masters=assembly.compiled.spec.masters,
        activation_bytes_per_row=max(kept, per_row if boundaries else 0),
        boundary_bytes_per_row=per_row,
        largest_unit_bytes=sizes.largest_unit_bytes,
        largest_unit_gradient_bytes=sizes.largest_unit_gradient_bytes,
    )


def _kept_bytes_per_row(index: int, assembly: Assembly, layer_inputs: Sequence[Sequence[InputBytes]]) -> int:
    """Bytes that a row of a ministage keeps for its backward: measured once a step has run, before that the
    inputs of the layers that are recomputed."""
    plan, offload = assembly.compiled.plan, assembly.resources.activations
    microbatches = plan.microbatches_of_rank(assembly.ranks.rank)
    found = [
        -(-offload.kept_bytes[index, number] // microbatch.num_rows)
        for number, microbatch in enumerate(microbatches)
        if offload is not None and (index, number) in offload.kept_bytes
    ]
    if found:
        return max(found)
    inputs = layer_inputs[index] if layer_inputs else ()
    return sum(each.per_row for each in inputs) if plan.group_of(index).recompute == "layer" else 0


def _bytes_per_row(boundary: Boundary) -> int:
    return sum(torch.Size(spec.shape_per_row).numel() * spec.dtype.itemsize for spec in boundary.tensors)


def reserve_activations(assembly: Assembly, layer_inputs: Sequence[Sequence[InputBytes]]) -> None:
    """Before the first step: host buffers for the inputs of all recomputed layers that it offloads."""
    plan, rank = assembly.compiled.plan, assembly.ranks.rank
    group = plan.groups[plan.group_of_rank[rank]]
    if assembly.resources.activations is None or group.recompute != "layer":
        return
    microbatches = plan.microbatches_of_rank(rank)
    sizes = [
        each.at(microbatches[action.microbatch].num_rows)
        for action in assembly.compiled.step_actions[rank]
        if action.kind is Kind.OFFLOAD and action.microbatch is not None and action.ministage is not None
        for each in layer_inputs[action.ministage]
    ]
    assembly.resources.memory.pool.reserve(Purpose.ACTIVATIONS, sizes)


def check_host_room(assembly: Assembly) -> None:
    """Before the first step: raises `ConfigError` on every rank alike if what the ranks of a node will
    still put on the host is more than that has left. Collective."""
    own, actions = assembly.ranks.rank, assembly.compiled.step_actions[assembly.ranks.rank]
    needed = sum(_needed_later(ministage, assembly, actions) for ministage in assembly.ministages.values())
    room = find_host_room()
    numbers = torch.zeros(assembly.ranks.world_size, 2, dtype=torch.int64)
    numbers[own] = torch.tensor([needed, room.num_bytes])
    dist.all_reduce(numbers, group=assembly.control)
    ranks_of: defaultdict[str, list[int]] = defaultdict(list)
    for rank, process in enumerate(assembly.ranks.process_of):
        ranks_of[assembly.processes[process].node].append(rank)
    refuse_crowded_hosts(ranks_of, numbers.tolist())


def _needed_later(ministage: ShardedMinistage, assembly: Assembly, actions: Sequence[Action]) -> int:
    """Host bytes for moments and deferred gradients of one ministage, which come with the first step."""
    if "optimizer" not in assembly.compiled.plan.group_of(ministage.index).offload:
        return 0
    sizes = ministage.sizes()
    optimizer = assembly.updates.optimizers.get(ministage.index)
    moments = sizes.trained_bytes * (count_moments(optimizer) if optimizer else 0)
    defers = any(action.kind is Kind.OFFLOAD_GRAD for action in actions)
    return moments + (sizes.gradient_shard_bytes if defers else 0)


def refuse_crowded_hosts(ranks_of: Mapping[str, Sequence[int]], numbers: Sequence[Sequence[int]]) -> None:
    """`numbers`: by rank, bytes that it needs and bytes that its machine has left."""
    for node, ranks in ranks_of.items():
        needed = sum(numbers[rank][0] for rank in ranks)
        room = min(numbers[rank][1] for rank in ranks)
        if needed > room:
            listed = ", ".join(f"rank {rank}: {numbers[rank][0] / GIB:.2f}" for rank in ranks)
            raise ConfigError(
                f"the first step would put {needed / GIB:.2f} GiB more of optimizer state and gradients into "
                f"the host memory of node '{node}' ({listed}), which has {room / GIB:.2f} GiB left: offload "
                "less there, or give its ranks fewer layers"
            )
