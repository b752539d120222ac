"""Proves a profile consistent: everything that a reader of it relies on."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from datetime import date
from itertools import pairwise
from typing import get_args

from zorselike.cost.profile import (
    PROFILE_VERSION,
    Collective,
    CollectiveTimes,
    Entry,
    HostLinkRates,
    LayerTimes,
    LinkTimes,
    Overheads,
    Profile,
    Source,
    SourceKind,
    UpdateTime,
    ZeroBatch,
    find_key,
)
from zorselike.errors import ProfileError
from zorselike.plan.plan import Recompute
from zorselike.plan.workload import ITEMSIZES
from zorselike.schedule.actions import Kind
from zorselike.text.wording import suggest

MAX_BYTES_PER_S = 1e13
"""No link is faster (10 TB/s): a larger number has the wrong unit."""

ACTION_KEYS = ("action_s", "unit_s", "shared_unit_s")
"""Of `Overheads`: seconds by kind of action."""


def validate_profile(profile: Profile) -> None:
    """Raises `ProfileError` naming the entry, its key and the mend."""
    if profile.version != PROFILE_VERSION:
        raise ProfileError(f"version is {profile.version}; this zorselike writes version {PROFILE_VERSION}")
    if not profile.model:
        raise ProfileError("model is empty; give the name of the model that was measured")
    seen: dict[tuple[type, Hashable], str] = {}
    for where, entry in list_entries(profile):
        _validate_entry(entry, where)
        key = type(entry), find_key(entry)
        if key in seen:
            raise ProfileError(f"{seen[key]} and {where} are of the same thing; keep one of them")
        seen[key] = where
    _validate_overheads(profile.overheads)


def list_entries(profile: Profile) -> Iterator[tuple[str, Entry]]:
    """Every entry with its place in the file, such as `layers[3]`."""
    lists: dict[str, Sequence[Entry]] = {
        "layers": profile.layers,
        "updates": profile.updates,
        "host_links": profile.host_links,
        "collectives": profile.collectives,
        "links": profile.links,
        "zero_batches": profile.zero_batches,
    }
    for name, entries in lists.items():
        for i, entry in enumerate(entries):
            yield f"{name}[{i}]", entry


def _validate_entry(entry: Entry, where: str) -> None:
    match entry:
        case LayerTimes():
            _validate_layer(entry, where)
        case UpdateTime():
            _require_name(f"{where}.device", entry.device)
            _require_choice(f"{where}.dtype", entry.dtype, tuple(ITEMSIZES))
            _require_seconds(f"{where}.seconds_per_parameter", entry.seconds_per_parameter)
            _require_seconds(f"{where}.seconds_per_call", entry.seconds_per_call)
        case HostLinkRates():
            _require_name(f"{where}.device", entry.device)
            for key in ("to_device", "to_host", "both"):
                _require_rate(f"{where}.{key}", getattr(entry, key))
        case CollectiveTimes():
            _validate_collective(entry, where)
        case LinkTimes():
            if tuple(sorted(entry.between)) != entry.between or not all(entry.between):
                raise ProfileError(f"{where}.between is {list(entry.between)}; give two node names, sorted")
            _require_curve(where, "num_bytes", entry.num_bytes, seconds=entry.seconds)
            _require_plausible(where, entry.num_bytes, entry.seconds)
        case ZeroBatch():
            _require_name(f"{where}.device", entry.device)
            _require_choice(f"{where}.zero", entry.zero, (0, 1, 2, 3))
            times = {"compute_s": entry.compute_s, "collective_s": entry.collective_s}
            _require_curve(where, "rows", entry.rows, **times)
            _require_max_rows(where, entry.max_rows, entry.rows)
    _validate_source(entry.source, f"{where}.source")


def _validate_layer(entry: LayerTimes, where: str) -> None:
    _require_name(f"{where}.kind", entry.kind)
    _require_name(f"{where}.device", entry.device)
    _require_choice(f"{where}.dtype", entry.dtype, tuple(ITEMSIZES))
    _require_choice(f"{where}.recompute", entry.recompute, get_args(Recompute))
    for key in ("sequence_length", "tensor_parallel"):
        if getattr(entry, key) < 1:
            raise ProfileError(f"{where}.{key} is {getattr(entry, key)}; give 1 or more")
    _require_curve(where, "rows", entry.rows, forward_s=entry.forward_s, backward_s=entry.backward_s)
    _require_max_rows(where, entry.max_rows, entry.rows)
    memory = entry.memory_bytes_per_row
    if memory is not None and not 0 <= memory < math.inf:
        raise ProfileError(f"{where}.memory_bytes_per_row is {memory}; give 0 or more, or leave it out")


def _validate_collective(entry: CollectiveTimes, where: str) -> None:
    _require_choice(f"{where}.op", entry.op, get_args(Collective))
    if len(entry.devices) < 2 or tuple(sorted(entry.devices)) != entry.devices:
        raise ProfileError(
            f"{where}.devices is {list(entry.devices)}; give the types of all devices of the group, sorted"
        )
    if not 1 <= entry.num_nodes <= len(entry.devices):
        raise ProfileError(
            f"{where}.num_nodes is {entry.num_nodes}; {len(entry.devices)} devices are on 1 to "
            f"{len(entry.devices)} nodes"
        )
    _require_curve(where, "num_bytes", entry.num_bytes, seconds=entry.seconds)


def _validate_overheads(overheads: Overheads) -> None:
    for key in ACTION_KEYS:
        _validate_action_s(f"overheads.{key}", getattr(overheads, key))
    _require_seconds("overheads.step_s", overheads.step_s)
    if not 1 <= overheads.overlap_slowdown < math.inf:
        raise ProfileError(
            f"overheads.overlap_slowdown is {overheads.overlap_slowdown}; it is a factor, 1 or more"
        )
    for key in ("context_bytes", "allocator_share"):
        if not 0 <= getattr(overheads, key) < math.inf:
            raise ProfileError(f"overheads.{key} is {getattr(overheads, key)}; give 0 or more")
    _validate_source(overheads.source, "overheads.source")


def _validate_action_s(where: str, entries: Sequence[tuple[str, float]]) -> None:
    kinds = [kind.value for kind in Kind]
    for kind, seconds in entries:
        if kind not in kinds:
            raise ProfileError(f"{where} has '{kind}', which is no kind of action{suggest(kind, kinds)}")
        _require_seconds(f"{where}.{kind}", seconds)
    if len({kind for kind, _ in entries}) < len(entries):
        raise ProfileError(f"{where} has a kind of action twice; keep one of them")


def _validate_source(source: Source, where: str) -> None:
    _require_choice(f"{where}.kind", source.kind, get_args(SourceKind))
    if source.date:
        try:
            date.fromisoformat(source.date)
        except ValueError:
            raise ProfileError(f"{where}.date is '{source.date}'; write it as 2026-11-21") from None


# -- values --------------------------------------------------------------------------------


def _require_name(where: str, value: str) -> None:
    if not value:
        raise ProfileError(f"{where} is empty; give a name")


def _require_choice(where: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ProfileError(f"{where} is {value!r}; give one of {', '.join(map(str, choices))}")


def _require_seconds(where: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ProfileError(f"{where} is {value}; a time is 0 or more and finite: measure it again")


def _require_rate(where: str, value: float) -> None:
    if not 0 < value <= MAX_BYTES_PER_S:
        raise ProfileError(
            f"{where} is {value:g} bytes/s; give one above 0 and at most 10 TB/s, in bytes per second"
        )


def _require_curve(where: str, key: str, sizes: Sequence[int], **times: Sequence[float]) -> None:
    """Sizes that rise from 1 or more, and as many times."""
    if not sizes:
        raise ProfileError(f"{where}.{key} is empty; give at least one measurement or remove the entry")
    if sizes[0] < 1:
        raise ProfileError(f"{where}.{key}[0] is {sizes[0]}; give 1 or more")
    for i, (earlier, later) in enumerate(pairwise(sizes)):
        if later <= earlier:
            raise ProfileError(
                f"{where}.{key}[{i + 1}] is {later} after {earlier}; sort the measurements, one of each size"
            )
    for name, values in times.items():
        if len(values) != len(sizes):
            raise ProfileError(
                f"{where}.{name} has {len(values)} times for {len(sizes)} {key}; give one for each"
            )
        for i, value in enumerate(values):
            _require_seconds(f"{where}.{name}[{i}]", value)


def _require_plausible(where: str, num_bytes: Sequence[int], seconds: Sequence[float]) -> None:
    for i, (size, duration) in enumerate(zip(num_bytes, seconds, strict=True)):
        if size > MAX_BYTES_PER_S * duration:
            raise ProfileError(
                f"{where}.seconds[{i}] is {duration:g} for {size} bytes, above 10 TB/s; "
                "are these seconds, and bytes?"
            )


def _require_max_rows(where: str, max_rows: int | None, rows: Sequence[int]) -> None:
    if max_rows is not None and max_rows < rows[-1]:
        raise ProfileError(
            f"{where}.max_rows is {max_rows}, yet {rows[-1]} rows were measured; mend one of them"
        )
