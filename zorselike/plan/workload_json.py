"""Workloads as JSON: reading, writing, validation and the fingerprint.

The keys are the fields of the dataclasses in `workload.py`; `kinds` is a list. Reading is strict: a key
that does not exist, or a value of another type, is an error that names file, key and mend.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from zorselike.errors import FileError, ProfileError
from zorselike.plan.workload import ITEMSIZES, LayerKind, Workload
from zorselike.text.files import hash_content, read_text, write_text
from zorselike.text.tables import (
    check_keys,
    check_version,
    read,
    read_int,
    read_list,
    read_number,
    read_optional,
    read_str,
    read_strings,
    read_table,
    wrong_type,
)
from zorselike.text.wording import list_few, suggest

WORKLOAD_VERSION = 1
_KIND_KEYS = tuple(field.name for field in fields(LayerKind))
_WORKLOAD_KEYS = ("version", *(field.name for field in fields(Workload)))
_FLOPS = ("forward_flops_per_row", "backward_flops_per_row")


def load_workload(path: str | Path) -> Workload:
    """Reads and validates a workload file.

    Raises:
        ProfileError: The file cannot be read, is not JSON, has an unknown key or a value of the wrong
            type, or contradicts itself. Names file, key and mend.
    """
    try:
        return parse_workload(read_text(path, "workload"))
    except (FileError, ProfileError) as error:
        raise ProfileError(f"{path}: {error}") from None


def parse_workload(text: str) -> Workload:
    """The workload that a JSON text says, validated; raises `ProfileError`."""
    try:
        workload = _read_workload(read_table(json.loads(text), "the file"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ProfileError(f"is not JSON: {error}") from None
    except FileError as error:
        raise ProfileError(str(error)) from None
    validate_workload(workload)
    return workload


def save_workload(workload: Workload, path: str | Path) -> None:
    """Writes a valid workload as JSON that `load_workload` reads back equal, whole or not at all.

    Raises:
        ProfileError: The workload contradicts itself, or the file cannot be written.
    """
    validate_workload(workload)
    try:
        write_text(path, _format(_describe(workload)))
    except FileError as error:
        raise ProfileError(f"{path}: {error}") from None


def fingerprint(workload: Workload) -> str:
    """Twelve hex digits of a hash over all of it."""
    return hash_content(_describe(workload))


def validate_workload(workload: Workload) -> None:
    """Raises `ProfileError` at the first thing that is wrong, naming key and mend."""
    if workload.dtype not in ITEMSIZES:
        raise ProfileError(f"dtype is {workload.dtype!r}; choose one of {', '.join(ITEMSIZES)}")
    if workload.sequence_length < 1:
        raise ProfileError(f"sequence_length is {workload.sequence_length}; it must be 1 or more")
    if workload.num_moments < 0:
        raise ProfileError(f"num_moments is {workload.num_moments}; it must be 0 or more (AdamW: 2)")
    if not workload.layers:
        raise ProfileError("layers is empty; list the model's modules with their kinds")
    for name, kind in workload.kinds.items():
        if name != kind.name:
            raise ProfileError(f"kinds has {kind.name!r} under the name {name!r}; give it one name")
        _validate_kind(kind)
    twice = [module for module, times in Counter(m for m, _ in workload.layers).items() if times > 1]
    if twice:
        raise ProfileError(f"layers has {list_few(twice, 'module')} more than once; list each once")
    for module, kind_name in workload.layers:
        if kind_name not in workload.kinds:
            hint = suggest(kind_name, workload.kinds) or f"; kinds has {', '.join(workload.kinds)}"
            raise ProfileError(f"layers: {module} is of kind {kind_name!r}, which kinds does not have{hint}")
    position = {module: i for i, (module, _) in enumerate(workload.layers)}
    for owner, borrower in workload.ties:
        for module in (owner, borrower):
            if module not in position:
                raise ProfileError(
                    f"ties names {module!r}, which is not in layers{suggest(module, position)}"
                )
        if position[owner] >= position[borrower]:
            raise ProfileError(f"ties: the owner {owner!r} must come before {borrower!r} in layers")


def _validate_kind(kind: LayerKind) -> None:
    for field in fields(kind):
        value = getattr(kind, field.name)
        if field.name != "name" and value is not None and not (math.isfinite(value) and value >= 0):
            raise ProfileError(f"kind {kind.name}: {field.name} is {value}; it must be a number from 0 up")
    if kind.trainable > kind.num_parameters:
        raise ProfileError(
            f"kind {kind.name}: num_trainable is {kind.num_trainable} of num_parameters = "
            f"{kind.num_parameters}; it cannot be more"
        )


# -- the file --------------------------------------------------------------------------------


def _describe(workload: Workload) -> dict[str, Any]:
    """All of it in the file's words; equal workloads give equal ones."""
    return {
        "version": WORKLOAD_VERSION,
        "model": workload.model,
        "sequence_length": workload.sequence_length,
        "dtype": workload.dtype,
        "num_moments": workload.num_moments,
        "kinds": [_describe_kind(kind) for _, kind in sorted(workload.kinds.items())],
        "layers": [list(layer) for layer in workload.layers],
        "ties": [list(tie) for tie in workload.ties],
    }


def _describe_kind(kind: LayerKind) -> dict[str, Any]:
    values = {field.name: getattr(kind, field.name) for field in fields(kind)}
    return {
        key: float(value) if key in _FLOPS else value for key, value in values.items() if value is not None
    }


def _format(content: Mapping[str, Any]) -> str:
    """JSON with a line for each layer and each value of a kind."""
    lists = ("layers", "ties")
    lines = [
        f"  {json.dumps(key)}: {_format_rows(value) if key in lists else _indent(value)}"
        for key, value in content.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _format_rows(rows: list[Any]) -> str:
    return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]" if rows else "[]"


def _indent(value: object) -> str:
    return json.dumps(value, indent=2).replace("\n", "\n  ")


def _read_workload(table: Mapping[str, Any]) -> Workload:
    check_keys(table, "", _WORKLOAD_KEYS, "workload")
    check_version(table, WORKLOAD_VERSION, f'write "version": {WORKLOAD_VERSION}')
    kinds = [
        _read_kind(read_table(kind, f"kinds[{i}]"), f"kinds[{i}].")
        for i, kind in enumerate(read(table, "kinds", _read_objects))
    ]
    for name, times in Counter(kind.name for kind in kinds).items():
        if times > 1:
            raise FileError(f"kinds has {name!r} {times} times; give each kind a name of its own")
    return Workload(
        model=read(table, "model", read_str),
        sequence_length=read(table, "sequence_length", read_int),
        dtype=read(table, "dtype", read_str),
        layers=read(table, "layers", _read_pairs),
        kinds={kind.name: kind for kind in kinds},
        ties=read_optional(table, "ties", _read_pairs, ()),
        num_moments=read_optional(table, "num_moments", read_int, 2),
    )


def _read_kind(table: Mapping[str, Any], where: str) -> LayerKind:
    check_keys(table, where, _KIND_KEYS, "kind")
    counts = {
        key: read_int(value, f"{where}{key}")
        for key, value in table.items()
        if key not in ("name", "num_parameters", *_FLOPS)
    }
    return LayerKind(
        name=read(table, "name", read_str, where),
        num_parameters=read(table, "num_parameters", read_int, where),
        forward_flops_per_row=read(table, "forward_flops_per_row", read_number, where),
        backward_flops_per_row=read_optional(table, "backward_flops_per_row", read_number, None, where),
        **counts,
    )


def _read_objects(value: object, where: str) -> list[object]:
    return read_list(value, where, "a list of objects")


def _read_pairs(value: object, where: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for i, item in enumerate(read_list(value, where, "a list of pairs of names")):
        names = read_strings(item, f"{where}[{i}]")
        if len(names) != 2:
            raise wrong_type(f"{where}[{i}]", item, "a pair of names")
        pairs.append((names[0], names[1]))
    return tuple(pairs)
