"""The profile: what was measured, on which device, when, and where each number is from.

Plain data, immutable and free of torch. `zorselike/cost/profile_json.py` reads and writes it;
`zorselike/cost/curves.py` turns its points into curves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, TypeVar

from zorselike.errors import ProfileError
from zorselike.plan.plan import Recompute
from zorselike.plan.workload import Workload

PROFILE_VERSION = 1
"""Raised when a key changes its meaning or must be there; keys that may be missing come without it, and files
from before them mean what they meant."""

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
SourceKind = Literal["measured", "interpolated", "catalogue", "given"]


@dataclass(frozen=True)
class Source:
    """Where a number is from."""

    kind: SourceKind
    date: str = ""
    """ISO, `2026-11-21`."""
    note: str = ""
    """Machine, file, tool."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds of one layer of a kind on one device, against rows computed at once."""

    kind: str
    """A `LayerKind.name`."""
    device: str
    """A device type."""
    dtype: str
    sequence_length: int
    recompute: Recompute = "none"
    """With `layer` the backward holds the second forward."""
    tensor_parallel: int = 1
    rows: tuple[int, ...]
    """Rising."""
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    max_rows: int | None = None
    """Beyond this the device ran out of memory; None: not looked for."""
    memory_bytes_per_row: float | None = None
    """What one row's forward leaves for its backward; None: not counted."""
    source: Source


@dataclass(frozen=True, kw_only=True)
class UpdateTime:
    """The optimizer's update: seconds per parameter and for each call, on one device."""

    device: str
    dtype: str
    seconds_per_parameter: float
    seconds_per_call: float = 0.0
    source: Source


@dataclass(frozen=True, kw_only=True)
class HostLinkRates:
    """Bytes per second between one device and pinned host memory."""

    device: str
    to_device: float
    to_host: float
    both: float
    """To and from together while both are busy."""
    source: Source


@dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """Seconds of one collective of a group of ranks, against the whole buffer's bytes."""

    op: Collective
    devices: tuple[str, ...]
    """Their types, sorted."""
    num_nodes: int
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    source: Source


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Seconds of a transfer between two devices, against bytes."""

    between: tuple[str, str]
    """Node names, sorted; the same twice: inside the node."""
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    source: Source


@dataclass(frozen=True, kw_only=True)
class ZeroBatch:
    """Poplar's measurements of a whole model on one device under one ZeRO stage."""

    device: str
    zero: int
    max_rows: int
    rows: tuple[int, ...]
    compute_s: tuple[float, ...]
    """Forward and backward without collectives."""
    collective_s: tuple[float, ...]
    source: Source


Entry = LayerTimes | UpdateTime | HostLinkRates | CollectiveTimes | LinkTimes | ZeroBatch

_Entry = TypeVar("_Entry", bound=Entry)


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """What the program itself costs."""

    action_s: tuple[tuple[str, float], ...] = ()
    """Host seconds of each kind of action beside what it computes and moves (`("F", 6e-4)`)."""
    unit_s: tuple[tuple[str, float], ...] = ()
    """More for each FSDP unit of the action's ministage, by kind of action; of a `NORM`, of the rank's."""
    shared_unit_s: tuple[tuple[str, float], ...] = ()
    """More for each unit that several ranks share: copies into and out of collectives. Of `F` and `B` it is
    what units cost that gather and reduce by themselves (ZeRO 3)."""
    step_s: float = 0.0
    """Host seconds of a step beside all its actions."""
    overlap_slowdown: float = 1.0
    """How much longer computation takes while communication runs beside it."""
    context_bytes: int = 0
    """On the device before any tensor: CUDA context, libraries."""
    allocator_share: float = 0.0
    """Of what tensors ask for, what the allocator adds by rounding and gaps."""
    source: Source = Source("given")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that is known about how fast a workload runs on some devices."""

    model: str
    """The workload's `model`."""
    workload_fingerprint: str = ""
    """Empty: for any workload of that model's layers."""
    layers: tuple[LayerTimes, ...] = ()
    updates: tuple[UpdateTime, ...] = ()
    host_links: tuple[HostLinkRates, ...] = ()
    collectives: tuple[CollectiveTimes, ...] = ()
    links: tuple[LinkTimes, ...] = ()
    zero_batches: tuple[ZeroBatch, ...] = ()
    overheads: Overheads = Overheads()
    version: int = PROFILE_VERSION

    def check_workload(self, workload: Workload) -> None:
        """Raises `ProfileError` if these times are of another model, dtype or sequence length.

        A profile without layers, such as one of links alone, is for any dtype and length.
        """
        if self.model.casefold() != workload.model.casefold():
            raise ProfileError(
                f"the profile is of '{self.model}', the workload is '{workload.model}'; give the profile of "
                "this model"
            )
        measured = {(times.dtype, times.sequence_length) for times in self.layers}
        if measured and (workload.dtype, workload.sequence_length) not in measured:
            known = ", ".join(f"{dtype} at {length} tokens" for dtype, length in sorted(measured))
            raise ProfileError(
                f"the profile of '{self.model}' has no times for {workload.dtype} at "
                f"{workload.sequence_length} tokens, only for {known}; measure it for that, or change the job"
            )
        if self.workload_fingerprint and self.workload_fingerprint != workload.fingerprint:
            raise ProfileError(
                f"the profile is for workload {self.workload_fingerprint}, this is {workload.fingerprint}: "
                f"layers of '{self.model}' have changed since; measure them again"
            )

    def merge(self, other: Profile) -> Profile:
        """Both together; where both have the same thing, it is that of `other`, the later one.

        Raises:
            ProfileError: They are of different models or workloads.
        """
        if self.model.casefold() != other.model.casefold():
            raise ProfileError(
                f"profiles of '{self.model}' and of '{other.model}' cannot be merged; one file is for one "
                "model"
            )
        prints = {self.workload_fingerprint, other.workload_fingerprint} - {""}
        if len(prints) > 1:
            raise ProfileError(
                f"profiles for workloads {self.workload_fingerprint} and {other.workload_fingerprint} of "
                f"'{self.model}' cannot be merged: its layers differ; measure one of them again"
            )
        return replace(
            other,
            workload_fingerprint=next(iter(prints), ""),
            layers=_merge(self.layers, other.layers),
            updates=_merge(self.updates, other.updates),
            host_links=_merge(self.host_links, other.host_links),
            collectives=_merge(self.collectives, other.collectives),
            links=_merge(self.links, other.links),
            zero_batches=_merge(self.zero_batches, other.zero_batches),
            overheads=_merge_overheads(self.overheads, other.overheads),
        )

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads and validates a profile; raises `ProfileError` naming file, entry and mend."""
        from zorselike.cost.profile_json import load_profile

        return load_profile(path)

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON that `Profile.load` reads back equal."""
        from zorselike.cost.profile_json import save_profile

        save_profile(self, path)


def find_key(entry: Entry) -> Hashable:
    """What an entry is of: no two entries of one profile have it in common."""
    match entry:
        case LayerTimes():
            how = (entry.dtype, entry.sequence_length, entry.recompute, entry.tensor_parallel)
            return entry.kind, entry.device, *how
        case UpdateTime():
            return entry.device, entry.dtype
        case HostLinkRates():
            return entry.device
        case CollectiveTimes():
            return entry.op, entry.devices, entry.num_nodes
        case LinkTimes():
            return entry.between
        case ZeroBatch():
            return entry.device, entry.zero


def _merge_overheads(earlier: Overheads, later: Overheads) -> Overheads:
    """The earlier ones with what the later ones say, source included: not all are measured at once."""
    nothing = Overheads()
    said = {
        field.name: getattr(later, field.name)
        for field in fields(Overheads)
        if getattr(later, field.name) != getattr(nothing, field.name)
    }
    if later.action_s:  # What the program takes is measured together, what turned out to be nothing too.
        said |= {key: getattr(later, key) for key in _OF_PROGRAM}
    return replace(earlier, **said)


_OF_PROGRAM = ("action_s", "unit_s", "shared_unit_s", "step_s", "overlap_slowdown")
"""Fields of `Overheads`."""


def _merge(earlier: Iterable[_Entry], later: Iterable[_Entry]) -> tuple[_Entry, ...]:
    """Entries in the order of their first appearance, with the later one's values."""
    merged = {find_key(entry): entry for entry in earlier}
    merged.update((find_key(entry), entry) for entry in later)
    return tuple(merged.values())
