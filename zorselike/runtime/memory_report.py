"""A rank's memory by purpose, planned and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from zorselike.cost.memory import walk_memory
from zorselike.cost.purposes import Purpose
from zorselike.cost.sizes import MinistageBytes
from zorselike.runtime.assembly import Assembly
from zorselike.runtime.comm.transport import BY_HOST
from zorselike.runtime.memory.memory import CHECKPOINT_COPIES
from zorselike.runtime.ministage.ministage import ShardedMinistage
from zorselike.runtime.ministage.optimizer_state import count_moments
from zorselike.runtime.model.boundaries import InputBytes, Trace
from zorselike.runtime.model.signature import Signature
from zorselike.text.units import GIB

_UNCOUNTED = (Purpose.GRADIENTS, Purpose.COMMUNICATION, Purpose.WORKING_SET)
"""Not in the ledger: FSDP2, autograd, torch's pinned pool and NCCL allocate and free it."""


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
        device = self.device_planned_bytes, self.device_peak_bytes
        total = MemoryLine("all at one time", *device, self.host_planned_bytes, self.host_peak_bytes)
        shown = [line for line in (*self.lines, total) if any(n is not None for n in line.numbers)]
        largest = max((n for line in shown for n in line.numbers if n is not None), default=0)
        unit, unit_bytes = ("GiB", GIB) if largest >= GIB else ("MiB", GIB // 1024)
        titles = ("device planned", "peak", "host planned", "peak")
        head = f"memory of rank {self.rank}, {unit}".ljust(34) + _align(titles)
        rows = [
            f"  {line.purpose:<32}"
            + _align(["-" if number is None else f"{number / unit_bytes:,.2f}" for number in line.numbers])
            for line in shown
        ]
        return "\n".join([head, *rows, _LEGEND])


_LEGEND = "  (-: not known before the first step, or autograd's and the allocator's affair)"


def _align(texts: Sequence[str]) -> str:
    return "".join(text.rjust(width) for text, width in zip(texts, (16, 8, 15, 8), strict=True))


def report_memory(assembly: Assembly, trace: Trace | None) -> MemoryReport:
    """The report of this rank; `trace` is None before the first step."""
    rank, ledger = assembly.ranks.rank, assembly.resources.memory.ledger
    sizes = {i: measure_ministage(ministage, assembly, trace) for i, ministage in assembly.ministages.items()}
    actions = assembly.compiled.step_actions[rank]
    is_concurrent = assembly.resources.memory.streams.is_concurrent
    kinds = assembly.transport.kinds
    by_host = [edge for edge, kind in kinds.items() if kind == BY_HOST]
    walk = walk_memory(assembly.plan, rank, actions, sizes, on_gpu=is_concurrent, by_host=by_host)
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
        rank=rank,
        lines=tuple(lines),
        device_planned_bytes=walk.device_peak_bytes,
        device_peak_bytes=torch.cuda.max_memory_allocated(assembly.device) if on_gpu else None,
        host_planned_bytes=walk.host_peak_bytes,
        host_peak_bytes=sum(ledger.peak(purpose, "host") for purpose in (*Purpose, CHECKPOINT_COPIES)),
    )


def measure_ministage(ministage: ShardedMinistage, assembly: Assembly, trace: Trace | None) -> MinistageBytes:
    """The sizes of one of this rank's ministages."""
    sizes, index = ministage.sizes, ministage.index
    boundaries = trace.boundaries[index : index + 2] if trace else ()
    per_row = max(map(_bytes_per_row, boundaries), default=0)
    return replace(
        sizes,
        state_bytes=sizes.state_bytes + (ministage.state.moment_bytes or expect_moments(ministage, assembly)),
        masters=assembly.compiled.spec.masters,
        activation_bytes_per_row=max(_kept_bytes_per_row(index, assembly, trace), per_row),
        boundary_bytes_per_row=per_row,
    )


def expect_moments(ministage: ShardedMinistage, assembly: Assembly) -> int:
    """Bytes of the moments that the first update will make."""
    optimizer = assembly.updates.optimizers.get(ministage.index)
    return ministage.sizes.gradient_shard_bytes * (count_moments(optimizer) if optimizer else 0)


def own_layer_inputs(assembly: Assembly, trace: Trace, ministage: int) -> list[InputBytes]:
    """What enters the layers of a ministage on this rank: of a replica's, its positions alone."""
    inputs, positions = trace.layer_inputs[ministage], assembly.positions
    if positions is None:
        return list(inputs)
    return [replace(each, per_row=each.per_row * positions.size // positions.length) for each in inputs]


def _kept_bytes_per_row(index: int, assembly: Assembly, trace: Trace | None) -> int:
    """Bytes that a row of a ministage keeps for its backward: measured once a step has run, before that the
    inputs of the layers that are recomputed."""
    offload = assembly.resources.activations
    found = [
        -(-offload.kept_bytes[index, number] // microbatch.num_rows)
        for number, microbatch in enumerate(assembly.plan.microbatches_of_rank(assembly.ranks.rank))
        if offload is not None and (index, number) in offload.kept_bytes
    ]
    if found:
        return max(found)
    inputs = own_layer_inputs(assembly, trace, index) if trace else ()
    return sum(each.per_row for each in inputs) if assembly.plan.group_of(index).recompute == "layer" else 0


def _bytes_per_row(boundary: Signature) -> int:
    return sum(torch.Size(spec.shape_per_row).numel() * spec.dtype.itemsize for spec in boundary.tensors)
