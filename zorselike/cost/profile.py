"""The profile: what was measured, on which device, when, and where each number is from.

Plain data, immutable and free of torch, kept as JSON with an entry a line, so that files can be compared.
`zorselike/cost/curves.py` turns its points into curves.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from itertools import pairwise
from typing import Annotated, Any, Literal

from zorselike.errors import ProfileError
from zorselike.plan.plan import Recompute
from zorselike.plan.workload import ITEMSIZES, Workload
from zorselike.schedule.actions import Kind
from zorselike.text.annotations import (
    AS_TABLE,
    MAX_BYTES_PER_S,
    Must,
    Name,
    Natural,
    OneOf,
    Positive,
    Quantity,
)
from zorselike.text.dataclass_tables import check_dataclass, read_dataclass, write_dataclass
from zorselike.text.document import Document
from zorselike.text.wording import suggest

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
SourceKind = Literal["measured", "interpolated", "catalogue", "given"]

Dtype = Annotated[str, OneOf(tuple(ITEMSIZES))]
_MOST_S, _MOST_BYTES = 1e9, 10**18
"""What nothing takes and nothing holds: more is a slip, whose sums and products would be no numbers."""

Seconds = Annotated[
    float, Must(lambda time: 0 <= time <= _MOST_S, "a time is 0 to 1e9 seconds: measure it again")
]
Rate = Annotated[
    float,
    Must(lambda rate: 1 <= rate <= MAX_BYTES_PER_S, "give 1 or more, up to 10 TB/s, in bytes per second"),
]
_LIMITED = Must(lambda size: size <= _MOST_BYTES, "give 1e18 or less")
Size = Annotated[Positive, _LIMITED]
Sizes = Annotated[tuple[Size, ...], Must(bool, "give at least one measurement or remove the entry")]
Factor = Annotated[float, Must(lambda factor: 1 <= factor <= 1e6, "it is a factor, 1 to 1e6")]
Bytes = Annotated[Natural, _LIMITED]
SecondsByAction = Annotated[tuple[tuple[str, Seconds], ...], AS_TABLE]


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

    kind: Name
    """A `LayerKind.name`."""
    device: Name
    """A device type."""
    dtype: Dtype
    sequence_length: Positive
    recompute: Recompute = "none"
    """What the backward recomputes: with `layer` it holds the second forward."""
    tensor_parallel: Positive = 1
    """Degree; seconds are those of one of its ranks without collectives."""
    rows: Sizes
    """Row counts that were measured, rising."""
    forward_s: tuple[Seconds, ...]
    backward_s: tuple[Seconds, ...]
    max_rows: int | None = None
    """Beyond this the device ran out of memory; None: not looked for."""
    memory_bytes_per_row: Annotated[Quantity, _LIMITED] | None = None
    """What one row's forward leaves for its backward; None: not counted."""
    source: Source


@dataclass(frozen=True, kw_only=True)
class UpdateTime:
    """The optimizer's update: seconds per parameter and for each call, on one device."""

    device: Name
    dtype: Dtype
    seconds_per_parameter: Seconds
    seconds_per_call: Seconds = 0.0
    source: Source


@dataclass(frozen=True, kw_only=True)
class HostLinkRates:
    """Bytes per second between one device and pinned host memory."""

    device: Name
    to_device: Rate
    to_host: Rate
    both: Rate
    """To and from together while both are busy."""
    source: Source


@dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """Seconds of one collective of a group of ranks, against the whole buffer's bytes."""

    op: Collective
    devices: tuple[str, ...]
    """Types of the group's devices, sorted."""
    num_nodes: Positive
    num_bytes: Sizes
    seconds: tuple[Seconds, ...]
    source: Source


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Seconds of a transfer between two devices, against bytes."""

    between: Annotated[tuple[Name, Name], "two node names, sorted"]
    """Node names, sorted; the same twice: inside the node."""
    num_bytes: Sizes
    seconds: tuple[Seconds, ...]
    source: Source


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The most rows of the whole model that trained at once on one device under one ZeRO stage, updated by
    AdamW (Poplar, Algorithm 1)."""

    device: Name
    """A device type."""
    zero: Annotated[int, OneOf((0, 1, 2, 3))]
    num_ranks: Positive = 1
    """Ranks that shared the model."""
    recompute: Recompute = "none"
    max_rows: Natural
    """The most that were tried and fitted; 0: not even one row."""
    refused_rows: int | None = None
    """The fewest that were tried and did not fit; None: all that were tried fitted."""
    limit_bytes: Positive
    """What tensors could take of the device."""
    source: Source


Entry = LayerTimes | UpdateTime | HostLinkRates | CollectiveTimes | LinkTimes | LargestBatch


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """What the program itself costs."""

    action_s: SecondsByAction = ()
    """Host seconds of each kind of action beside what it computes and moves (`("F", 6e-4)`)."""
    unit_s: SecondsByAction = ()
    """More for each FSDP unit of the action's ministage, by kind of action; of a `NORM`, of the rank's."""
    shared_unit_s: SecondsByAction = ()
    """More for each unit that several ranks share: copies into and out of collectives. Of `F` and `B` it is
    what units cost that gather and reduce by themselves (ZeRO 3)."""
    step_s: Seconds = 0.0
    """Host seconds of a step beside all its actions."""
    overlap_slowdown: Factor = 1.0
    """How much longer computation takes while communication runs beside it."""
    context_bytes: Bytes = 0
    """Device memory in use before any tensor: CUDA context, libraries."""
    pools_bytes: Bytes = 0
    """Device memory that the allocator holds for the runtime's streams beside what tensors ask for."""
    communicator_bytes: Bytes = 0
    """Device memory of one NCCL communicator: of two ranks in one direction, or of a group."""
    allocator_share: Annotated[Quantity, Must(lambda share: share <= 1e6, "it is a share, 0 to 1e6")] = 0.0
    """What the allocator adds by rounding and gaps, as a share of what tensors ask for."""
    source: Source = Source("given")

    @property
    def process_bytes(self) -> int:
        """Device memory that a process takes whatever its plan is."""
        return self.context_bytes + self.pools_bytes


@dataclass(frozen=True, kw_only=True)
class Profile(Document):
    """All that is known about how fast a workload runs on some devices.

    `Profile.load(path)` and `profile.save(path)` read and write JSON; what is wrong is a `ProfileError`.
    """

    noun = "profile"
    error = ProfileError
    syntax = "JSON"
    version = 2

    model: Name
    """Name of the model that was measured, a `Workload.model`."""
    workload_fingerprint: str = ""
    """Empty: for any workload of that model's layers."""
    layers: tuple[LayerTimes, ...] = ()
    updates: tuple[UpdateTime, ...] = ()
    host_links: tuple[HostLinkRates, ...] = ()
    collectives: tuple[CollectiveTimes, ...] = ()
    links: tuple[LinkTimes, ...] = ()
    largest_batches: tuple[LargestBatch, ...] = ()
    overheads: Overheads = Overheads()

    def check_model(self, name: str) -> None:
        """Raises `ProfileError` if these times are of a model of another name."""
        if self.model.casefold() != name.casefold():
            raise ProfileError(
                f"the profile is of '{self.model}', the workload is '{name}'; give the profile of this model"
            )

    def check_workload(self, workload: Workload) -> None:
        """Raises `ProfileError` if these times are of another model, dtype or sequence length.

        A profile without layers, such as one of links alone, is for any dtype and length.
        """
        self.check_model(workload.model)
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
        """Both together; where both have the same thing, it is that of `other`, the later one. Raises
        `ProfileError` if they are of different models or workloads."""
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
        merged: dict[str, Any] = {
            name: _merge(entries, getattr(other, name)) for name, entries in self._list_tables()
        }
        overheads = _merge_overheads(self.overheads, other.overheads)
        return replace(other, workload_fingerprint=next(iter(prints), ""), overheads=overheads, **merged)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Profile:
        return read_dataclass(cls, table)

    def to_text(self) -> str:
        lines = []
        for key, value in {"version": self.version, **write_dataclass(self)}.items():
            if isinstance(value, list) and value:
                entries = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
                lines.append(f' "{key}": [\n{entries}\n ]')
            else:
                lines.append(f' "{key}": {json.dumps(value)}')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def validate(self) -> Profile:
        """Returns the profile itself if it is consistent; raises `ProfileError` otherwise."""
        with self.errors():
            check_dataclass(self)
        seen: dict[tuple[type, Hashable], str] = {}
        for where, entry in self.list_entries():
            _validate_entry(entry, where)
            key = type(entry), find_key(entry)
            if key in seen:
                raise ProfileError(f"{seen[key]} and {where} are of the same thing; keep one of them")
            seen[key] = where
        for name in ("action_s", "unit_s", "shared_unit_s"):
            _validate_actions(f"overheads.{name}", [kind for kind, _ in getattr(self.overheads, name)])
        _validate_date(self.overheads.source, "overheads.source")
        return self

    def list_entries(self) -> Iterator[tuple[str, Entry]]:
        """Every entry with its place in the file, such as `layers[3]`."""
        for name, entries in self._list_tables():
            yield from ((f"{name}[{i}]", entry) for i, entry in enumerate(entries))

    def _list_tables(self) -> Iterator[tuple[str, tuple[Entry, ...]]]:
        return ((name, entries) for name, entries in vars(self).items() if isinstance(entries, tuple))


def find_key(entry: Entry) -> Hashable:
    """What an entry is of: no two entries of one profile have it in common."""
    return tuple(getattr(entry, name) for name in _KEYS[type(entry)])


_KEYS: Mapping[type[Entry], tuple[str, ...]] = {
    LayerTimes: ("kind", "device", "dtype", "sequence_length", "recompute", "tensor_parallel"),
    UpdateTime: ("device", "dtype"),
    HostLinkRates: ("device",),
    CollectiveTimes: ("op", "devices", "num_nodes"),
    LinkTimes: ("between",),
    LargestBatch: ("device", "zero", "num_ranks", "recompute"),
}


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


_OF_PROGRAM = (
    *("action_s", "unit_s", "shared_unit_s", "step_s", "overlap_slowdown"),
    *("pools_bytes", "communicator_bytes"),
)
"""Fields of `Overheads`."""


def _merge(earlier: Iterable[Entry], later: Iterable[Entry]) -> tuple[Entry, ...]:
    """Entries in the order of their first appearance, with the later one's values."""
    return tuple({find_key(entry): entry for entry in (*earlier, *later)}.values())


# -- consistency ---------------------------------------------------------------------------


def _validate_entry(entry: Entry, where: str) -> None:
    _validate_date(entry.source, f"{where}.source")
    match entry:
        case LayerTimes():
            _require_curve(entry, where, "rows", "forward_s", "backward_s")
            if entry.max_rows is not None and entry.max_rows < entry.rows[-1]:
                raise ProfileError(
                    f"{where}.max_rows is {entry.max_rows}, yet {entry.rows[-1]} rows were measured; "
                    "mend one of them"
                )
        case CollectiveTimes():
            if len(entry.devices) < 2 or tuple(sorted(entry.devices)) != entry.devices:
                raise ProfileError(
                    f"{where}.devices is {list(entry.devices)}; give the types of all devices of the group, "
                    "sorted"
                )
            if entry.num_nodes > len(entry.devices):
                raise ProfileError(
                    f"{where}.num_nodes is {entry.num_nodes}; {len(entry.devices)} devices are on 1 to "
                    f"{len(entry.devices)} nodes"
                )
            _require_curve(entry, where, "num_bytes", "seconds")
        case LinkTimes():
            if tuple(sorted(entry.between)) != entry.between:
                raise ProfileError(f"{where}.between is {list(entry.between)}; give two node names, sorted")
            _require_curve(entry, where, "num_bytes", "seconds")
            for i, (size, seconds) in enumerate(zip(entry.num_bytes, entry.seconds, strict=True)):
                if size > MAX_BYTES_PER_S * seconds:
                    raise ProfileError(
                        f"{where}.seconds[{i}] is {seconds:g} for {size} bytes, above 10 TB/s; "
                        "are these seconds, and bytes?"
                    )
        case LargestBatch():
            if entry.refused_rows is not None and entry.refused_rows <= entry.max_rows:
                raise ProfileError(
                    f"{where}.refused_rows is {entry.refused_rows}, yet {entry.max_rows} fitted; mend one of "
                    "them"
                )


def _validate_date(source: Source, where: str) -> None:
    try:
        date.fromisoformat(source.date or "2026-11-21")
    except ValueError:
        raise ProfileError(f"{where}.date is '{source.date}'; write it as 2026-11-21") from None


def _validate_actions(where: str, names: Sequence[str]) -> None:
    kinds = [kind.value for kind in Kind]
    for name in names:
        if name not in kinds:
            raise ProfileError(f"{where} has '{name}', which is no kind of action{suggest(name, kinds)}")
    if len(set(names)) < len(names):
        raise ProfileError(f"{where} has a kind of action twice; keep one of them")


def _require_curve(entry: Entry, where: str, key: str, *times: str) -> None:
    """Sizes that rise, and as many of each field of times."""
    sizes: Sequence[int] = getattr(entry, key)
    for i, (earlier, later) in enumerate(pairwise(sizes)):
        if later <= earlier:
            raise ProfileError(
                f"{where}.{key}[{i + 1}] is {later} after {earlier}; sort the measurements, one of each size"
            )
    for name in times:
        number = len(getattr(entry, name))
        if number != len(sizes):
            raise ProfileError(f"{where}.{name} has {number} times for {len(sizes)} {key}; give one for each")
