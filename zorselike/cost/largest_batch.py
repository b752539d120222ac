"""What the largest batch that was found on a device says about the memory model (Poplar, Algorithm 1).

The search trains the whole model as one ministage of all ranks, one microbatch a rank. Where the model finds
room for rows that the device refused, the least that closes the gap is added to whatever is planned for that
type of device: what libraries, an allocator's gaps and the model's own buffers take there. So a plan like the
one that was tried never gets more rows than were found to fit, and others are held to the same overhead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from zorselike.cost.memory import walk_memory
from zorselike.cost.parameter_bytes import ParameterBytes, count_shards
from zorselike.cost.profile import LargestBatch, Profile
from zorselike.cost.purposes import MemoryWalk
from zorselike.cost.sizes import KeptBytes, add_up, find_row_bytes, list_units
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan, Recompute
from zorselike.plan.workload import Workload
from zorselike.schedule import ScheduleSpec, build
from zorselike.text.wording import count, show_bytes

ADAMW_MOMENTS = 2
"""The search updates with AdamW."""


@dataclass(frozen=True, kw_only=True)
class WholeModelStep:
    """One rank's step of the whole model as the search runs it, as the memory model has it: a microbatch of
    one row and then the largest, which finds gradients there."""

    workload: Workload
    device: str
    zero: int
    num_ranks: int
    recompute: Recompute
    kept_bytes: KeptBytes

    def peak_bytes(self, rows: int) -> int:
        """The most that its tensors take."""
        return self.walk(rows).device_peak_bytes

    def walk(self, rows: int) -> MemoryWalk:
        """What it holds."""
        ranks = (0,) if self.num_ranks == 1 else (0, 1)  # Others hold the same.
        microbatches = tuple(
            Microbatch(rank, rank * (1 + rows) + start, rank * (1 + rows) + stop)
            for rank in ranks
            for start, stop in ((0, 1), (1, 1 + rows))
        )
        group = Group(ranks, microbatches, zero=self.zero, recompute=self.recompute)
        plan = Plan(len(ranks) * (1 + rows), (group,), (Ministage(0, self._modules),))
        each = ParameterBytes(self.workload.itemsize, ADAMW_MOMENTS)
        units = list_units(plan, self.workload)[0]
        row_bytes = find_row_bytes(plan, self.workload, 0, self.device, self.kept_bytes)
        sizes = add_up(units, row_bytes, each, num_shards=count_shards(self.zero, self.num_ranks))
        actions = build(ScheduleSpec(plan, masters=each.masters))[0]
        return walk_memory(plan, 0, actions, {0: sizes})

    def most_rows(self, limit_bytes: int, most: int) -> int:
        """The most rows, up to `most`, with which the tensors fit; 0: none."""
        return bisect_right(range(1, most + 1), limit_bytes, key=self.peak_bytes)

    @cached_property
    def row_bytes(self) -> int:
        """What one row more takes, with many."""
        return self.peak_bytes(2**20 + 1) - self.peak_bytes(2**20)

    @cached_property
    def _modules(self) -> tuple[str, ...]:
        return tuple(module for module, _ in self.workload.layers)


@dataclass(frozen=True)
class MemoryCorrection:
    """What the memory model is to add for a type of device."""

    num_bytes: int
    found: LargestBatch
    """What asks for the most of it."""

    def __str__(self) -> str:
        found = self.found
        fitted = f"{count(found.max_rows, 'row')} fitted and " if found.max_rows else ""
        return (
            f"{found.device}: {show_bytes(self.num_bytes)} taken beside what is counted, since with ZeRO "
            f"{found.zero} {fitted}{found.refused_rows} did not"
        )


def find_corrections(
    profile: Profile, workload: Workload, kept_bytes: KeptBytes
) -> Mapping[str, MemoryCorrection]:
    """By type of device, where the memory model is too generous with it, with activations as measured
    (`LayerTimeModel.kept_bytes`). Nothing unless the profile is of just this workload: its largest batches
    are then those of its layers, length and dtype."""
    if profile.workload_fingerprint != workload.fingerprint:
        return {}
    corrections: dict[str, MemoryCorrection] = {}
    for found in profile.largest_batches:
        if found.refused_rows is None:
            continue
        how = {key: getattr(found, key) for key in ("device", "zero", "num_ranks", "recompute")}
        step = WholeModelStep(workload=workload, kept_bytes=kept_bytes, **how)
        tensors = step.peak_bytes(found.refused_rows)
        needed = tensors + round(profile.overheads.allocator_share * tensors)
        lacking = found.limit_bytes - needed + 1
        known = corrections.get(found.device)
        if lacking > (known.num_bytes if known else 0):
            corrections[found.device] = MemoryCorrection(lacking, found)
    return corrections
