"""Plans as TOML: reading, writing and the fingerprint of what they say.

The keys are the fields of the dataclasses in `plan.py`; only `shares` is an addition, the
shorthand that `shares.py` expands. Reading is strict: a key that does not exist, or a value
of another type, is an error that names file, key and mend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from zorselike.errors import FileError, PlanError
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
from zorselike.text.files import hash_content, read_text, write_text
from zorselike.text.tables import (
    check_keys,
    check_version,
    read,
    read_int,
    read_ints,
    read_list,
    read_number,
    read_optional,
    read_str,
    read_strings,
    read_table,
    read_tables,
    wrong_type,
)
from zorselike.text.toml import format_table, parse_toml
from zorselike.text.wording import count

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
GROUP_KEYS = (
    "ranks",
    "zero",
    "grad_reduce",
    "offload",
    "recompute",
    "max_in_flight",
    "microbatches",
    "shares",
)
MINISTAGE_KEYS = ("group", "modules")
DEVICE_KEYS = ("rank", "node", "local_rank", "type")
ESTIMATES_KEYS = ("iteration_s", "cost_per_iteration", "share_of_ideal", "limited_by", "peak_memory_bytes")


def load_plan(path: str | Path) -> Plan:
    """Reads and validates a plan file.

    Raises:
        PlanError: The file cannot be read, is not TOML, has an unknown key or a value of the
            wrong type, or the plan contradicts itself. Names file, key and mend.
    """
    try:
        return parse_plan(read_text(path, "plan"))
    except (FileError, PlanError) as error:
        raise PlanError(f"{path}: {error}") from None


def parse_plan(text: str) -> Plan:
    """The plan that a TOML text says, validated, with `shares` expanded; raises `PlanError`."""
    try:
        plan = _read_plan(parse_toml(text))
    except FileError as error:
        raise PlanError(str(error)) from None
    validate_plan(plan)
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Writes a valid plan as TOML that `load_plan` reads back equal.

    Atomic: whoever reads the file sees the old one or the new one, whole.

    Raises:
        PlanError: The plan contradicts itself, or the file cannot be written.
    """
    text = format_plan(plan)
    try:
        write_text(path, text)
    except FileError as error:
        raise PlanError(f"{path}: {error}") from None


def format_plan(plan: Plan) -> str:
    """A valid plan as the text of a plan file; raises `PlanError` if it contradicts itself."""
    validate_plan(plan)
    lines = [
        f"# plan {plan.fingerprint}: {count(plan.num_ranks, 'rank')}, {count(len(plan.groups), 'group')}, "
        f"{count(plan.num_ministages, 'ministage')}",
        *format_table(
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
        lines += ["", *format_estimates(plan.estimates)]
    for group in plan.groups:
        settings = {
            "ranks": group.ranks,
            "zero": group.zero,
            "grad_reduce": group.grad_reduce,
            "offload": group.offload,
            "recompute": group.recompute,
            "max_in_flight": group.max_in_flight,
        }
        microbatches = [(m.rank, m.start, m.stop) for m in group.microbatches]
        lines += ["", "[[groups]]", *format_table(settings)]
        lines += ["# [rank, first row, row after the last] in processing order"]
        lines += format_table({"microbatches": microbatches})
    for ministage in plan.ministages:
        lines += ["", "[[ministages]]"]
        lines += format_table({"group": ministage.group, "modules": ministage.modules})
    for device in plan.devices:
        place = {"rank": device.rank, "node": device.node, "local_rank": device.local_rank}
        lines += ["", "[[devices]]", *format_table({**place, "type": device.type or None})]
    return "\n".join(lines) + "\n"


def format_estimates(estimates: Estimates) -> list[str]:
    """The lines of a plan file's `[estimates]`."""
    values = {
        "iteration_s": estimates.iteration_s,
        "cost_per_iteration": estimates.cost_per_iteration,
        "share_of_ideal": estimates.share_of_ideal,
        "limited_by": estimates.limited_by or None,
        "peak_memory_bytes": estimates.peak_memory_bytes or None,
    }
    return ["[estimates]", *format_table(values)]


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
                # Absent where there is none, so that plans of before it keep their fingerprints.
                **({} if group.max_in_flight is None else {"max_in_flight": group.max_in_flight}),
            }
            for group in plan.groups
        ],
        "ministages": [(ministage.group, ministage.modules) for ministage in plan.ministages],
        "devices": sorted((d.rank, d.node, d.local_rank, d.type) for d in plan.devices),
    }
    return hash_content(content)


def _read_plan(table: Mapping[str, Any]) -> Plan:
    check_keys(table, "", PLAN_KEYS, "plan")
    check_version(table, PLAN_VERSION, f'write "version = {PLAN_VERSION}" on the first line')
    global_batch = read(table, "global_batch", read_int)
    if global_batch < 1:
        raise PlanError(f"global_batch is {global_batch}; give 1 or more")
    return Plan(
        global_batch=global_batch,
        groups=tuple(
            _read_group(group, f"groups[{g}].", global_batch)
            for g, group in enumerate(read(table, "groups", read_tables))
        ),
        ministages=tuple(
            _read_ministage(ministage, f"ministages[{s}].")
            for s, ministage in enumerate(read(table, "ministages", read_tables))
        ),
        devices=tuple(
            _read_device(device, f"devices[{i}].")
            for i, device in enumerate(read_optional(table, "devices", read_tables, ()))
        ),
        sequence_length=read_optional(table, "sequence_length", read_int, None),
        model=read_optional(table, "model", read_str, None),
        cluster_fingerprint=read_optional(table, "cluster_fingerprint", read_str, None),
        workload_fingerprint=read_optional(table, "workload_fingerprint", read_str, None),
        estimates=read_optional(table, "estimates", _read_estimates, Estimates()),
    )


def _read_group(table: Mapping[str, Any], where: str, global_batch: int) -> Group:
    check_keys(table, where, GROUP_KEYS, "plan")
    ranks = read(table, "ranks", _read_ranks, where)
    return Group(
        ranks=ranks,
        microbatches=_read_microbatches(table, where, ranks, global_batch),
        zero=read_optional(table, "zero", read_int, 2, where),
        # Any string passes here; which ones are valid is for `validate_plan` to say.
        grad_reduce=cast(GradReduce, read_optional(table, "grad_reduce", read_str, "once", where)),
        offload=read_optional(table, "offload", read_strings, (), where),
        recompute=cast(Recompute, read_optional(table, "recompute", read_str, "none", where)),
        max_in_flight=read_optional(table, "max_in_flight", read_int, None, where),
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
    check_keys(table, where, MINISTAGE_KEYS, "plan")
    return Ministage(
        group=read(table, "group", read_int, where),
        modules=read(table, "modules", read_strings, where),
    )


def _read_device(table: Mapping[str, Any], where: str) -> Device:
    check_keys(table, where, DEVICE_KEYS, "plan")
    return Device(
        rank=read(table, "rank", read_int, where),
        node=read(table, "node", read_str, where),
        local_rank=read(table, "local_rank", read_int, where),
        type=read_optional(table, "type", read_str, "", where),
    )


def _read_estimates(value: object, where: str) -> Estimates:
    table = read_table(value, where)
    check_keys(table, f"{where}.", ESTIMATES_KEYS, "plan")
    return Estimates(
        iteration_s=read_optional(table, "iteration_s", read_number, None, f"{where}."),
        cost_per_iteration=read_optional(table, "cost_per_iteration", read_number, None, f"{where}."),
        share_of_ideal=read_optional(table, "share_of_ideal", read_number, None, f"{where}."),
        limited_by=read_optional(table, "limited_by", read_strings, (), f"{where}."),
        peak_memory_bytes=read_optional(table, "peak_memory_bytes", read_ints, (), f"{where}."),
    )


def _read_ranks(value: object, where: str) -> tuple[Replica, ...]:
    items = read_list(value, where, "a list of integers")
    return tuple(
        read_ints(item, f"{where}[{i}]") if isinstance(item, list) else read_int(item, f"{where}[{i}]")
        for i, item in enumerate(items)
    )


def _read_triples(value: object, where: str, meaning: str) -> list[tuple[int, int, int]]:
    triples = []
    for i, item in enumerate(read_list(value, where, f"a list of {meaning}")):
        if not isinstance(item, list) or len(item) != 3:
            raise wrong_type(f"{where}[{i}]", item, meaning)
        first, second, third = (read_int(number, f"{where}[{i}][{k}]") for k, number in enumerate(item))
        triples.append((first, second, third))
    return triples
