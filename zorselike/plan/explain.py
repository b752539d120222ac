"""A plan as a table that a person reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zorselike.plan.parts import Estimates, Group, Microbatch
from zorselike.text.layout import align_columns
from zorselike.text.units import GIB
from zorselike.text.wording import count, list_few, show_modules, show_numbers

if TYPE_CHECKING:
    from zorselike.plan.plan import Plan


_MANY = 100
"""Ranks of which nobody reads a line each."""


def explain_plan(plan: Plan) -> str:
    """Who computes what: a heading, then for each group its ranks with their rows and its ministages.

    Shares are of the group's rows, which are the rows of the global batch. Devices and
    estimates are shown where the plan has them.
    """
    lines = [
        f"plan {plan.fingerprint}: {count(plan.global_batch, 'row')} per step, "
        f"{count(plan.num_ranks, 'rank')} in {count(len(plan.groups), 'group')}, "
        f"{count(plan.num_ministages, 'ministage')}"
    ]
    if plan.model is not None:
        lines.append(f"model: {plan.model}")
    if plan.sequence_length is not None:
        lines.append(f"sequence length: {plan.sequence_length}")
    if plan.cluster_fingerprint is not None:
        lines.append(f"cluster: {plan.cluster_fingerprint}")
    if plan.workload_fingerprint is not None:
        lines.append(f"workload: {plan.workload_fingerprint}")
    lines += _explain_estimates(plan.estimates)
    for g, group in enumerate(plan.groups):
        lines += ["", f"group {g}: {_explain_settings(group)}"]
        if group.max_in_flight is not None:
            lines.append(f"  at most {count(group.max_in_flight, 'microbatch')} of a rank in flight")
        lines += [f"  {line}" for line in align_columns(_list_ranks(plan, group), left=(3, 4, 5))]
        ministages = [("ministage", "modules")]
        ministages += [
            (str(s), show_modules(plan.ministages[s].modules)) for s in plan.ministages_of_group(g)
        ]
        lines += [f"  {line}" for line in align_columns(ministages, left=(1,))]
    return "\n".join(lines)


def _explain_estimates(estimates: Estimates) -> list[str]:
    parts = []
    if estimates.iteration_s is not None:
        parts.append(f"{estimates.iteration_s:.4g} s per step")
    if estimates.cost_per_iteration is not None:
        parts.append(f"cost {estimates.cost_per_iteration:.4g} per step")
    return [f"estimated: {', '.join(parts)}"] if parts else []


def _explain_settings(group: Group) -> str:
    ranks = [
        str(replica.first) if replica.degree == 1 else f"({show_numbers(replica.ranks)})"
        for replica in group.replicas
    ]
    named = show_numbers(group.flat_ranks) if group.degree == 1 else ", ".join(ranks)
    reduce = "per microbatch" if group.reduces_per_microbatch else "once per step"
    reduce += " and waited for" if group.waits_for_reductions else ""
    settings = [
        f"{'rank' if len(group.flat_ranks) == 1 else 'ranks'} {named}",
        *([f"tensor parallelism {_show_degrees(group)}"] if group.degree > 1 else []),
        f"ZeRO {group.zero}",
        f"gradients reduced {reduce}",
        f"offload {', '.join(group.offload) or 'none'}",
        f"recompute {group.recompute}",
    ]
    return "; ".join(settings)


def _show_degrees(group: Group) -> str:
    """`2`, or `4, 2 and 1`."""
    return list_few(sorted({replica.degree for replica in group.replicas}, reverse=True))


def _list_ranks(plan: Plan, group: Group) -> list[tuple[str, ...]]:
    """A heading and a line per rank, or, of `_MANY` ranks and more, for all that are alike; columns that the
    plan says nothing about are left out."""
    device_of = {device.rank: device for device in plan.devices}
    peaks = plan.estimates.peak_memory_bytes
    heading = ["rank", "rows", "share", "microbatches"]
    heading += ["device"] if device_of else []
    heading += ["estimated peak"] if peaks else []
    folds = plan.num_ranks >= _MANY
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in group.flat_ranks:
        microbatches = group.microbatches_by_rank[rank]
        rows = sum(microbatch.num_rows for microbatch in microbatches)
        cells = [str(rows), f"{100 * rows / plan.global_batch:.1f} %", _show_sizes(microbatches)]
        first = group.replica_of(rank).first
        if rank != first:
            cells = ["", "", "with the first of its replica" if folds else f"with rank {first}"]
        if device_of:
            device = device_of[rank]
            place = "" if folds else f"{device.node}:{device.local_rank} "
            cells.append(f"{place}{device.type}".rstrip())
        if peaks:
            cells.append(f"{peaks[rank] / GIB:.2f} GiB")
        alike.setdefault((*cells,) if folds else (*cells, str(rank)), []).append(rank)
    width = len(heading) - 1
    return [tuple(heading), *((show_numbers(ranks), *cells[:width]) for cells, ranks in alike.items())]


def _show_sizes(microbatches: Sequence[Microbatch]) -> str:
    """`3 x 4 rows, 1 x 2 rows`, largest first."""
    sizes = Counter(microbatch.num_rows for microbatch in microbatches)
    return (
        ", ".join(f"{times} x {count(size, 'row')}" for size, times in sorted(sizes.items(), reverse=True))
        or "none"
    )
