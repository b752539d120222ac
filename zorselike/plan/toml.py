"""Plans as TOML: reading, writing and the fingerprint of what they say.

The keys are the fields of the dataclasses in `plan.py`; only `shares` is an addition, the
shorthand that `shares.py` expands. Reading is strict: a key that does not exist, or a value
of another type, is an error that names file, key and mend.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import tomli_w

from zorselike.plan.errors import PlanError
from zorselike.plan.plan import (
    PLAN_VERSION,
    Device,
    Estimates,
    GradReduce,
    Group,
    Microbatch,
    Ministage,
    Plan,
    Recompute,
    Replica,
)
from zorselike.plan.shares import expand_shares
from zorselike.plan.validate import validate_plan
from zorselike.plan.wording import count, show_value, suggest

T = TypeVar("T")
D = TypeVar("D")

LINE_LENGTH = 100

PLAN_KEYS = (
    "version",
    "global_batch",
    "sequence_length",
    "model",
    "cluster_fingerprint",
    "workload_fingerprint",
    "estimates",
    "groups",
    "ministages",
    "devices",
)
GROUP_KEYS = ("ranks", "zero", "grad_reduce", "offload", "recompute", "microbatches", "shares")
MINISTAGE_KEYS = ("group", "modules")
DEVICE_KEYS = ("rank", "node", "local_rank", "type")
ESTIMATES_KEYS = ("iteration_s", "cost_per_iteration", "peak_memory_bytes")


def load_plan(path: str | Path) -> Plan:
    """Reads and validates a plan file.

    Raises:
        PlanError: The file cannot be read, is not TOML, has an unknown key or a value of the
            wrong type, or the plan contradicts itself. Names file, key and mend.
    """
    try:
        # A byte-order mark is no error: some editors write one unasked.
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise PlanError(f"{path}: there is no such file; check the path of the plan") from None
    except IsADirectoryError:
        raise PlanError(f"{path}: is a directory; give the plan file in it") from None
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is not a text file (byte {error.start}); a plan is UTF-8 TOML") from None
    try:
        return parse_plan(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def parse_plan(text: str) -> Plan:
    """The plan that a TOML text says, validated, with `shares` expanded; raises `PlanError`."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(f"is not TOML: {error}") from None
    plan = _read_plan(table)
    validate_plan(plan)
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Writes a valid plan as TOML that `load_plan` reads back equal.

    Atomic: whoever reads the file sees the old one or the new one, whole.

    Raises:
        PlanError: The plan contradicts itself, or the file cannot be written.
    """
    text = format_plan(plan)
    target = Path(path).resolve()
    if target.is_dir():
        raise PlanError(f"{path}: is a directory; give the name of a file in it")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PlanError(f"{path}: cannot be written: {error.strerror}") from None


def format_plan(plan: Plan) -> str:
    """A valid plan as the text of a plan file; raises `PlanError` if it contradicts itself."""
    validate_plan(plan)
    lines = [
        f"# plan {plan.fingerprint}: {count(plan.num_ranks, 'rank')}, {count(len(plan.groups), 'group')}, "
        f"{count(plan.num_ministages, 'ministage')}",
        *_format_table(
            {
                "version": plan.version,
                "global_batch": plan.global_batch,
                "sequence_length": plan.sequence_length,
                "model": plan.model,
                "cluster_fingerprint": plan.cluster_fingerprint,
                "workload_fingerprint": plan.workload_fingerprint,
            }
        ),
    ]
    if plan.estimates != Estimates():
        estimates = plan.estimates
        lines += [
            "",
            "[estimates]",
            *_format_table(
                {
                    "iteration_s": estimates.iteration_s,
                    "cost_per_iteration": estimates.cost_per_iteration,
                    "peak_memory_bytes": estimates.peak_memory_bytes or None,
                }
            ),
        ]
    for group in plan.groups:
        settings = {
            "ranks": group.ranks,
            "zero": group.zero,
            "grad_reduce": group.grad_reduce,
            "offload": group.offload,
            "recompute": group.recompute,
        }
        microbatches = [(m.rank, m.start, m.stop) for m in group.microbatches]
        lines += ["", "[[groups]]", *_format_table(settings)]
        lines += ["# [rank, first row, row after the last] in processing order"]
        lines += _format_table({"microbatches": microbatches})
    for ministage in plan.ministages:
        lines += ["", "[[ministages]]"]
        lines += _format_table({"group": ministage.group, "modules": ministage.modules})
    for device in plan.devices:
        place = {"rank": device.rank, "node": device.node, "local_rank": device.local_rank}
        lines += ["", "[[devices]]", *_format_table({**place, "type": device.type or None})]
    return "\n".join(lines) + "\n"


def fingerprint(plan: Plan) -> str:
    """Twelve hex digits of a hash over all that decides what is computed where.

    Neither where the plan came from (fingerprints, estimates) nor how it is written (the order
    of devices or of offload kinds, `grad_reduce` beside ZeRO 3) makes a difference.
    """
    content = {
        "version": plan.version,
        "global_batch": plan.global_batch,
        "sequence_length": plan.sequence_length,
        "model": plan.model,
        "groups": [
            {
                "ranks": group.ranks,
                "microbatches": [(m.rank, m.start, m.stop) for m in group.microbatches],
                "zero": group.zero,
                "reduces_per_microbatch": group.reduces_per_microbatch,
                "offload": sorted(group.offload),
                "recompute": group.recompute,
            }
            for group in plan.groups
        ],
        "ministages": [(ministage.group, ministage.modules) for ministage in plan.ministages],
        "devices": sorted((d.rank, d.node, d.local_rank, d.type) for d in plan.devices),
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def _read_plan(table: Mapping[str, Any]) -> Plan:
    _check_keys(table, "", PLAN_KEYS)
    # Before anything else is judged: another version may mean something else by any key.
    version = _read_optional(table, "version", _read_int, None)
    if version is None:
        raise PlanError(f'version is missing; write "version = {PLAN_VERSION}" on the first line')
    if version != PLAN_VERSION:
        raise PlanError(f"version is {version}; this zorselike reads version {PLAN_VERSION}")
    global_batch = _read(table, "global_batch", _read_int)
    if global_batch < 1:
        raise PlanError(f"global_batch is {global_batch}; give 1 or more")
    return Plan(
        version=version,
        global_batch=global_batch,
        groups=tuple(
            _read_group(group, f"groups[{g}].", global_batch)
            for g, group in enumerate(_read(table, "groups", _read_tables))
        ),
        ministages=tuple(
            _read_ministage(ministage, f"ministages[{s}].")
            for s, ministage in enumerate(_read(table, "ministages", _read_tables))
        ),
        devices=tuple(
            _read_device(device, f"devices[{i}].")
            for i, device in enumerate(_read_optional(table, "devices", _read_tables, ()))
        ),
        sequence_length=_read_optional(table, "sequence_length", _read_int, None),
        model=_read_optional(table, "model", _read_str, None),
        cluster_fingerprint=_read_optional(table, "cluster_fingerprint", _read_str, None),
        workload_fingerprint=_read_optional(table, "workload_fingerprint", _read_str, None),
        estimates=_read_optional(table, "estimates", _read_estimates, Estimates()),
    )


def _read_group(table: Mapping[str, Any], where: str, global_batch: int) -> Group:
    _check_keys(table, where, GROUP_KEYS)
    ranks = _read(table, "ranks", _read_ranks, where)
    return Group(
        ranks=ranks,
        microbatches=_read_microbatches(table, where, ranks, global_batch),
        zero=_read_optional(table, "zero", _read_int, 2, where),
        # Any string passes here; which ones are valid is for `validate_plan` to say.
        grad_reduce=cast(GradReduce, _read_optional(table, "grad_reduce", _read_str, "once", where)),
        offload=_read_optional(table, "offload", _read_strings, (), where),
        recompute=cast(Recompute, _read_optional(table, "recompute", _read_str, "none", where)),
    )


def _read_microbatches(
    table: Mapping[str, Any], where: str, ranks: Sequence[Replica], global_batch: int
) -> tuple[Microbatch, ...]:
    match "microbatches" in table, "shares" in table:
        case True, True:
            raise PlanError(f"{where}shares and {where}microbatches are both given; keep one of them")
        case False, False:
            raise PlanError(
                f"{where}shares is missing; give shares = [[rank, rows, rows_per_microbatch], ...] "
                "or microbatches = [[rank, start, stop], ...]"
            )
        case True, _:
            triples = _read_triples(table["microbatches"], f"{where}microbatches", "[rank, start, stop]")
            return tuple(Microbatch(*triple) for triple in triples)
        case _:
            triples = _read_triples(table["shares"], f"{where}shares", "[rank, rows, rows_per_microbatch]")
            members = {rank for entry in ranks for rank in (entry if isinstance(entry, tuple) else (entry,))}
            for i, (rank, _, _) in enumerate(triples):
                # Said here, in the words of the file; validation would name the expanded microbatch.
                if rank not in members:
                    raise PlanError(
                        f"{where}shares[{i}] is for rank {rank}, which is not in {where}ranks; "
                        "add it there, or give its rows to a rank of the group"
                    )
            try:
                return expand_shares(triples, global_batch)
            except PlanError as error:
                raise PlanError(f"{where}{error}") from None


def _read_ministage(table: Mapping[str, Any], where: str) -> Ministage:
    _check_keys(table, where, MINISTAGE_KEYS)
    return Ministage(
        group=_read(table, "group", _read_int, where),
        modules=_read(table, "modules", _read_strings, where),
    )


def _read_device(table: Mapping[str, Any], where: str) -> Device:
    _check_keys(table, where, DEVICE_KEYS)
    return Device(
        rank=_read(table, "rank", _read_int, where),
        node=_read(table, "node", _read_str, where),
        local_rank=_read(table, "local_rank", _read_int, where),
        type=_read_optional(table, "type", _read_str, "", where),
    )


def _read_estimates(table: object, where: str) -> Estimates:
    if not isinstance(table, dict):
        raise _wrong_type(where, table, "a table")
    _check_keys(table, f"{where}.", ESTIMATES_KEYS)
    return Estimates(
        iteration_s=_read_optional(table, "iteration_s", _read_number, None, f"{where}."),
        cost_per_iteration=_read_optional(table, "cost_per_iteration", _read_number, None, f"{where}."),
        peak_memory_bytes=_read_optional(table, "peak_memory_bytes", _read_ints, (), f"{where}."),
    )


def _check_keys(table: Mapping[str, Any], where: str, valid: Sequence[str]) -> None:
    for key in table:
        if key not in valid:
            hint = suggest(key, valid) or f"; valid keys are {', '.join(valid)}"
            raise PlanError(f"{where}{key} is not a key of a plan{hint}")


def _read(table: Mapping[str, Any], key: str, read: Callable[[object, str], T], where: str = "") -> T:
    """A key that must be there; `read` takes the value and the name of its place."""
    if key not in table:
        raise PlanError(f"{where}{key} is missing; add it")
    return read(table[key], f"{where}{key}")


def _read_optional(
    table: Mapping[str, Any], key: str, read: Callable[[object, str], T], default: D, where: str = ""
) -> T | D:
    return read(table[key], f"{where}{key}") if key in table else default


def _read_int(value: object, where: str) -> int:
    if type(value) is not int:  # bool is an int to isinstance
        raise _wrong_type(where, value, "an integer")
    return value


def _read_number(value: object, where: str) -> float:
    if type(value) not in (int, float):
        raise _wrong_type(where, value, "a number")
    return cast(float, value)


def _read_str(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong_type(where, value, "a string")
    return value


def _read_list(value: object, where: str, expected: str) -> list[object]:
    if not isinstance(value, list):
        raise _wrong_type(where, value, expected)
    return value


def _read_ints(value: object, where: str) -> tuple[int, ...]:
    items = _read_list(value, where, "a list of integers")
    return tuple(_read_int(item, f"{where}[{i}]") for i, item in enumerate(items))


def _read_strings(value: object, where: str) -> tuple[str, ...]:
    items = _read_list(value, where, "a list of strings")
    return tuple(_read_str(item, f"{where}[{i}]") for i, item in enumerate(items))


def _read_ranks(value: object, where: str) -> tuple[Replica, ...]:
    items = _read_list(value, where, "a list of integers")
    return tuple(
        _read_ints(item, f"{where}[{i}]") if isinstance(item, list) else _read_int(item, f"{where}[{i}]")
        for i, item in enumerate(items)
    )


def _read_triples(value: object, where: str, meaning: str) -> list[tuple[int, int, int]]:
    triples = []
    for i, item in enumerate(_read_list(value, where, f"a list of {meaning}")):
        if not isinstance(item, list) or len(item) != 3:
            raise _wrong_type(f"{where}[{i}]", item, meaning)
        first, second, third = (_read_int(number, f"{where}[{i}][{k}]") for k, number in enumerate(item))
        triples.append((first, second, third))
    return triples


def _read_tables(value: object, where: str) -> Sequence[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _wrong_type(where, value, f"a list of tables, each under a line [[{where}]]")
    return value


def _wrong_type(where: str, value: object, expected: str) -> PlanError:
    return PlanError(f"{where} is {show_value(value)}; it must be {expected}")


def _format_table(values: Mapping[str, object]) -> list[str]:
    """`key = value` lines, without those keys whose value is None."""
    return [_format_line(key, value) for key, value in values.items() if value is not None]


def _format_line(key: str, value: object) -> str:
    line = f"{key} = {_format_value(value)}"
    if len(line) <= LINE_LENGTH or not isinstance(value, (list, tuple)):
        return line
    # tomli_w writes one number a line; a thousand microbatches want a table one can read.
    rows = [""]
    for item in value:
        text = f"{_format_value(item)}, "
        if rows[-1] and len(rows[-1]) + len(text) > LINE_LENGTH - 4:
            rows.append("")
        rows[-1] += text
    return "\n".join([f"{key} = [", *(f"    {row.rstrip()}" for row in rows), "]"])


def _format_value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_format_value(item) for item in value)}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")
