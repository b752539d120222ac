"""Plans as TOML, and the fingerprint of what they say.

The keys are the fields of the dataclasses; additions are `shares`, the shorthand that `shares.py` expands,
and ranges of layers in `modules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from zorselike.errors import FileError, PlanError
from zorselike.plan.parts import Estimates, Group, Microbatch, Ministage
from zorselike.plan.shares import expand_shares
from zorselike.text.annotations import Positive
from zorselike.text.dataclass_tables import (
    check_value,
    read_dataclass,
    read_table,
    read_value,
    write_dataclass,
)
from zorselike.text.files import hash_content
from zorselike.text.toml import format_table
from zorselike.text.wording import count, expand_modules

if TYPE_CHECKING:
    from zorselike.plan.plan import Plan

_ROWS = {
    "microbatches": tuple[Annotated[tuple[int, int, int], "[rank, start, stop]"], ...],
    "shares": tuple[Annotated[tuple[int, int, int], "[rank, rows, rows_per_microbatch]"], ...],
}


def read_group(value: object, where: str, *, plan: Mapping[str, Any]) -> Group:
    """A group of a plan's table, its `shares` expanded to microbatches; raises `FileError`."""
    table = read_table(value, where)
    group = read_dataclass(Group, table, where, extra=tuple(_ROWS), microbatches=())
    given = [key for key in _ROWS if key in table]
    if len(given) > 1:
        raise FileError(f"{where}.shares and {where}.microbatches are both given; keep one of them")
    if not given:
        raise FileError(
            f"{where}.shares is missing; give shares = [[rank, rows, rows_per_microbatch], ...] "
            "or microbatches = [[rank, start, stop], ...]"
        )
    (key,) = given
    rows = read_value(_ROWS[key], table[key], f"{where}.{key}")
    if key == "microbatches":
        return replace(group, microbatches=tuple(Microbatch(*row) for row in rows))
    for i, (rank, _, _) in enumerate(rows):
        # Said here, in the words of the file; validation would name the expanded microbatch.
        if rank not in group.flat_ranks:
            raise FileError(
                f"{where}.shares[{i}] is for rank {rank}, which is not in {where}.ranks; "
                "add it there, or give its rows to a rank of the group"
            )
        first = group.replica_of(rank).first
        if rank != first:
            raise FileError(
                f"{where}.shares[{i}] is for rank {rank}, inside a replica; name the replica's first, {first}"
            )
    check_value(Positive, plan["global_batch"], "global_batch")
    try:
        return replace(group, microbatches=expand_shares(rows, plan["global_batch"]))
    except PlanError as error:
        raise FileError(f"{where}.{error}") from None


def read_ministage(value: object, where: str) -> Ministage:
    """A ministage of a plan's table, ranges of layers expanded; raises `FileError`."""
    ministage = read_dataclass(Ministage, read_table(value, where), where)
    try:
        return replace(ministage, modules=tuple(expand_modules(ministage.modules)))
    except ValueError as error:
        raise FileError(
            f"{where}.modules has '{error}'; a range goes up within one list, as in 'layers.0 .. layers.7'"
        ) from None


def format_plan(plan: Plan) -> str:
    """A valid plan as the text of a plan file."""
    table = write_dataclass(plan)
    settings = {key: value for key, value in table.items() if isinstance(value, (int, str))}
    lines = [
        f"# plan {plan.fingerprint}: {count(plan.num_ranks, 'rank')}, {count(len(plan.groups), 'group')}, "
        f"{count(plan.num_ministages, 'ministage')}",
        *format_table({"version": plan.version, **settings}),
    ]
    if plan.estimates != Estimates():
        lines += ["", *format_estimates(plan.estimates)]
    for group in plan.groups:
        table = write_dataclass(group)
        if group.overlap_grad_reduce:
            del table["overlap_grad_reduce"]  # Plans of before it stay what they were.
        rows = {"microbatches": [list(row.values()) for row in table.pop("microbatches")]}
        lines += ["", "[[groups]]", *format_table(table)]
        lines += ["# [rank, first row, row after the last] in processing order", *format_table(rows)]
    for ministage in plan.ministages:
        lines += ["", "[[ministages]]", *format_table(write_dataclass(ministage))]
    for device in plan.devices:
        lines += ["", "[[devices]]", *format_table(write_dataclass(device, omit_defaults=True))]
    return "\n".join(lines) + "\n"


def format_estimates(estimates: Estimates) -> list[str]:
    """The lines of a plan file's `[estimates]`."""
    return ["[estimates]", *format_table(write_dataclass(estimates, omit_defaults=True))]


def fingerprint_plan(plan: Plan) -> str:
    """See `Plan.fingerprint`."""
    content = {
        "version": plan.version,
        "global_batch": plan.global_batch,
        "sequence_length": plan.sequence_length,
        "model": plan.model,
        "groups": [
            {
                # A list of one rank is that rank.
                "ranks": [
                    replica.ranks if replica.degree > 1 else replica.first for replica in group.replicas
                ],
                "microbatches": [(m.rank, m.start, m.stop) for m in group.microbatches],
                "zero": group.zero,
                "reduces_per_microbatch": group.reduces_per_microbatch,
                "offload": sorted(group.offload),
                "recompute": group.recompute,
                # Absent where they say nothing, so that plans of before them keep their fingerprints.
                **({} if group.max_in_flight is None else {"max_in_flight": group.max_in_flight}),
                **({"overlap_grad_reduce": False} if group.waits_for_reductions else {}),
            }
            for group in plan.groups
        ],
        "ministages": [(ministage.group, ministage.modules) for ministage in plan.ministages],
        "devices": sorted((d.rank, d.node, d.local_rank, d.type) for d in plan.devices),
    }
    return hash_content(content)
