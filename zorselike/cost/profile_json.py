"""Profiles as JSON: reading and writing. The keys are the fields of the dataclasses in `profile.py`.

Reading is strict: a key that does not exist, a value of another type, or one that contradicts another is
an error that names file, entry and mend. Each entry is written on one line, so that files can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import Any, NoReturn

from zorselike.cost.profile import (
    PROFILE_VERSION,
    CollectiveTimes,
    HostLinkRates,
    LayerTimes,
    LinkTimes,
    Overheads,
    Profile,
    Source,
    UpdateTime,
    ZeroBatch,
)
from zorselike.cost.validate_profile import ACTION_KEYS, validate_profile
from zorselike.errors import FileError, ProfileError
from zorselike.text.files import read_text, write_text
from zorselike.text.tables import (
    check_keys,
    check_version,
    read,
    read_int,
    read_ints,
    read_list,
    read_number,
    read_numbers,
    read_str,
    read_strings,
    read_table,
)

_Reader = Callable[[object, str], Any]


def load_profile(path: str | Path) -> Profile:
    """Reads and validates a profile.

    Raises:
        ProfileError: The file cannot be read, is not JSON, has an unknown key or a value of the wrong type,
            or is not consistent. Names file, entry and mend.
    """
    try:
        return parse_profile(read_text(path, "profile"))
    except (FileError, ProfileError) as error:
        raise ProfileError(f"{path}: {error}") from None


def parse_profile(text: str) -> Profile:
    """The profile that a JSON text says; raises `ProfileError`."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ProfileError(f"is not JSON: {error}") from None
    try:
        table = read_table(found, "the file")
        check_version(table, PROFILE_VERSION, f'add "version": {PROFILE_VERSION}')
        profile: Profile = _read_fields(Profile, table, "")
    except FileError as error:
        raise ProfileError(str(error)) from None
    validate_profile(profile)
    return profile


def save_profile(profile: Profile, path: str | Path) -> None:
    """Writes a profile that `load_profile` reads back equal; whoever reads the file sees the old one or
    the new one, whole.

    Raises:
        ProfileError: The profile is not consistent, or the file cannot be written.
    """
    try:
        write_text(path, format_profile(profile))
    except (FileError, ProfileError) as error:
        raise ProfileError(f"{path}: {error}") from None


def format_profile(profile: Profile) -> str:
    """The text of a profile's file; raises `ProfileError` if it is not consistent."""
    validate_profile(profile)
    content = {"version": profile.version} | _to_json(asdict(profile))
    for key in ACTION_KEYS:
        content["overheads"][key] = dict(getattr(profile.overheads, key))
    lines = []
    for key, value in content.items():
        if isinstance(value, list):
            entries = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
            lines.append(f' "{key}": [\n{entries}\n ]' if value else f' "{key}": []')
        else:
            lines.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _to_json(value: Any) -> Any:
    """Lists for tuples; what is None is left out."""
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items() if item is not None}
    return [_to_json(item) for item in value] if isinstance(value, tuple) else value


def _refuse_constant(text: str) -> NoReturn:
    raise ProfileError(f"has {text}, which is no number; measure again, or remove the entry")


# -- reading -------------------------------------------------------------------------------


def _read_fields(kind: type, table: Mapping[str, Any], where: str) -> Any:
    """An instance of one of the dataclasses, from the table at a place."""
    prefix = f"{where}." if where else ""
    known: Mapping[str, Field[Any]] = {field.name: field for field in fields(kind)}
    check_keys(table, prefix, tuple(known), "profile")
    readers = _READERS[kind]
    values = {
        name: read(table, name, readers[name], prefix)
        for name, field in known.items()
        if name in table or (field.default is MISSING and field.default_factory is MISSING)
    }
    return kind(**values)


def _entry_of(kind: type) -> _Reader:
    return lambda value, where: _read_fields(kind, read_table(value, where), where)


def _entries_of(kind: type) -> _Reader:
    def read_entries(value: object, where: str) -> tuple[Any, ...]:
        items = read_list(value, where, "a list of entries")
        return tuple(_entry_of(kind)(item, f"{where}[{i}]") for i, item in enumerate(items))

    return read_entries


def _read_two(value: object, where: str) -> tuple[str, ...]:
    names = read_strings(value, where)
    if len(names) != 2:
        raise FileError(f"{where} has {len(names)} names; give two")
    return names


def _read_action_s(value: object, where: str) -> tuple[tuple[str, float], ...]:
    table = read_table(value, where)
    return tuple((kind, read_number(seconds, f"{where}.{kind}")) for kind, seconds in table.items())


_SOURCE = _entry_of(Source)

_READERS: Mapping[type, Mapping[str, _Reader]] = {
    Source: {"kind": read_str, "date": read_str, "note": read_str},
    LayerTimes: {
        "kind": read_str,
        "device": read_str,
        "dtype": read_str,
        "sequence_length": read_int,
        "recompute": read_str,
        "tensor_parallel": read_int,
        "rows": read_ints,
        "forward_s": read_numbers,
        "backward_s": read_numbers,
        "max_rows": read_int,
        "memory_bytes_per_row": read_number,
        "source": _SOURCE,
    },
    UpdateTime: {
        "device": read_str,
        "dtype": read_str,
        "seconds_per_parameter": read_number,
        "seconds_per_call": read_number,
        "source": _SOURCE,
    },
    HostLinkRates: {
        "device": read_str,
        "to_device": read_number,
        "to_host": read_number,
        "both": read_number,
        "source": _SOURCE,
    },
    CollectiveTimes: {
        "op": read_str,
        "devices": read_strings,
        "num_nodes": read_int,
        "num_bytes": read_ints,
        "seconds": read_numbers,
        "source": _SOURCE,
    },
    LinkTimes: {
        "between": _read_two,
        "num_bytes": read_ints,
        "seconds": read_numbers,
        "source": _SOURCE,
    },
    ZeroBatch: {
        "device": read_str,
        "zero": read_int,
        "max_rows": read_int,
        "rows": read_ints,
        "compute_s": read_numbers,
        "collective_s": read_numbers,
        "source": _SOURCE,
    },
    Overheads: {
        **dict.fromkeys(ACTION_KEYS, _read_action_s),
        "step_s": read_number,
        "overlap_slowdown": read_number,
        "context_bytes": read_int,
        "allocator_share": read_number,
        "source": _SOURCE,
    },
    Profile: {
        "version": read_int,
        "model": read_str,
        "workload_fingerprint": read_str,
        "layers": _entries_of(LayerTimes),
        "updates": _entries_of(UpdateTime),
        "host_links": _entries_of(HostLinkRates),
        "collectives": _entries_of(CollectiveTimes),
        "links": _entries_of(LinkTimes),
        "zero_batches": _entries_of(ZeroBatch),
        "overheads": _entry_of(Overheads),
    },
}
"""How each field is read; a field with a default may be missing."""
