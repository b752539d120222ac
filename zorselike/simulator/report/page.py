"""One page on a simulated step: how fast, against what, who limits, and what fits where."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from zorselike.simulator.report.limits import describe_limit
from zorselike.simulator.simulated_plan import Baseline, SimulatedPlan
from zorselike.text.layout import align_columns
from zorselike.text.wording import count, list_few, show_bytes, show_numbers

_BAR = 20
"""Characters of a full memory bar."""
_MOST_LINES = 24
"""Of ranks; beyond, those with the most room are only counted."""


def format_report(
    case: SimulatedPlan,
    baselines: Sequence[Baseline],
    *,
    ideal_s: float,
    notes: Sequence[str] = (),
    width: int = 100,
) -> str:
    """The page, in lines of at most `width` characters where numbers allow it.

    Args:
        case: the plan in question.
        baselines: what it is compared with.
        ideal_s: the step of devices that compute all the time (`simulator/report/ideal.py`).
        notes: what a reader must know before any number.
        width: of lines of prose.
    """
    sections = [
        [_describe_job(case), *notes],
        _compare(case, baselines, width),
        _describe_step(case, ideal_s),
        describe_limit(case),
        _list_ranks(case),
        _list_assumptions(case),
    ]
    return "\n\n".join("\n".join(_wrap(line, width) for line in section) for section in sections if section)


def _wrap(line: str, width: int) -> str:
    """Prose is wrapped; tables, which begin with a space, stay as they are."""
    if line.startswith(" ") or len(line) <= width:
        return line
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _describe_job(case: SimulatedPlan) -> str:
    plan, workload, cluster = case.plan, case.workload, case.cluster
    where = f" on cluster {cluster.name}" if cluster.name else ""
    order = "" if case.schedule == "ours" else f", schedule {case.schedule}"
    return (
        f"plan {plan.fingerprint}{where}: {workload.model}, {workload.dtype}, "
        f"{count(plan.global_batch, 'row')} of {workload.sequence_length:,} tokens a step, "
        f"{count(plan.num_ranks, 'rank')} in {count(len(plan.groups), 'group')}, "
        f"{count(plan.num_ministages, 'ministage')}{order}"
    )


# -- against what ------------------------------------------------------------------------------


def _compare(case: SimulatedPlan, baselines: Sequence[Baseline], width: int) -> list[str]:
    """This plan, then what one would run without it, a line each, or two where a line is too long."""
    rows = [("this plan", *_show_speed(case), _show_overfull(case))]
    for other in baselines:
        if other.case is None:
            rows.append((other.name, "", "", other.reason))
            continue
        ratio = other.case.simulation.iteration_s / case.simulation.iteration_s
        rows.append((other.name, *_show_speed(other.case), f"plan is {ratio:.2f} x as fast ({other.how})"))
    numbers = [f"  {line}" for line in align_columns([row[:-1] for row in rows], left=(0,))]
    column = max(map(len, numbers)) + 2
    lines = []
    for number, (*_, note) in zip(numbers, rows, strict=True):
        line = f"{number:{column}}{note}".rstrip()
        lines += [line] if len(line) <= width else [number, *_indent(note, width)]
    return lines


def _indent(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")


def _show_speed(case: SimulatedPlan) -> tuple[str, str]:
    return f"{case.simulation.iteration_s:.4g} s per step", f"{case.tokens_per_s:,.0f} tokens/s"


def _show_overfull(case: SimulatedPlan) -> str:
    parts = []
    ranks = [rank for rank in range(case.plan.num_ranks) if case.is_overfull(rank)]
    if ranks:
        parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {show_numbers(ranks)}")
    hosts = [case.cluster.nodes[node].name for node in case.host_bytes if case.is_host_overfull(node)]
    if hosts:
        parts.append(list_few(hosts, "host"))
    return f"OUT OF MEMORY on {' and '.join(parts)}" if parts else ""


def _describe_step(case: SimulatedPlan, ideal_s: float) -> list[str]:
    simulation = case.simulation
    lines = [
        f"share of the ideal: {ideal_s / simulation.iteration_s:.1%} ({ideal_s:.4g} s if all devices "
        "computed all the time, every layer once, in the microbatches that suit them best)"
    ]
    if simulation.cost or simulation.egress_cost:
        tokens = case.plan.global_batch * case.workload.sequence_length
        currency = case.costs.currency
        egress = (
            f", of it {simulation.egress_cost:.4g} for traffic between zones"
            if simulation.egress_cost
            else ""
        )
        lines.append(
            f"money: {simulation.cost:.4g} {currency} per step{egress}; "
            f"{simulation.cost / tokens * 1e9:,.2f} {currency} per 10^9 tokens"
        )
    return lines


def _list_assumptions(case: SimulatedPlan) -> list[str]:
    if not case.costs.assumptions:
        return []
    return ["Not measured, so assumed:", *(f"- {text}" for text in case.costs.assumptions)]


# -- ranks -------------------------------------------------------------------------------------


def _list_ranks(case: SimulatedPlan) -> list[str]:
    """A table of where time goes and how full memory is; ranks with the same line share it."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in range(case.plan.num_ranks):
        alike.setdefault(_describe_rank(case, rank), []).append(rank)
    shown = sorted(alike.items(), key=lambda item: -_fullness(case, item[1][0]))[:_MOST_LINES]
    shown.sort(key=lambda item: item[1][0])
    heading = ("rank", "device", "group", "computes", "data", "wires", "copies", "memory", "", "")
    table = [heading, *((show_numbers(ranks), *cells) for cells, ranks in shown)]
    lines = [f"  {line}" for line in align_columns(table, left=(0, 1, 7, 9))]
    left_out = sum(len(ranks) for ranks in alike.values()) - sum(len(ranks) for _, ranks in shown)
    if left_out:
        lines.append(f"  {count(left_out, 'more rank')}, each with more room than these")
    lines += _list_hosts(case)
    lines.append(
        "computes, and waits for data, wires and copies: shares of the step. " + _describe_peak(case)
    )
    return lines


def _describe_rank(case: SimulatedPlan, rank: int) -> tuple[str, ...]:
    times, iteration_s = case.simulation.ranks[rank], case.simulation.iteration_s
    shares = (
        times.busy_s,
        times.waiting_for_data_s,
        times.exposed_communication_s,
        times.exposed_copies_s,
    )
    peak, limit = case.peak_bytes[rank], case.limit_bytes(rank)
    of_limit = "" if limit is None else f"of {show_bytes(limit)}"
    return (
        case.device_types[rank],
        str(case.plan.group_of_rank[rank]),
        *(f"{seconds / iteration_s:.0%}" for seconds in shares),
        "" if limit is None else _draw_bar(peak / limit),
        show_bytes(peak),
        of_limit + (" OUT OF MEMORY" if case.is_overfull(rank) else ""),
    )


def _list_hosts(case: SimulatedPlan) -> list[str]:
    """How full host memory is with what is offloaded; nodes with the same numbers share a line."""
    alike: dict[str, list[str]] = {}
    for node, num_bytes in sorted(case.host_bytes.items()):
        limit = case.cluster.nodes[node].host_memory_bytes
        text = show_bytes(num_bytes) + ("" if limit is None else f" of {show_bytes(limit)}")
        text += " OUT OF MEMORY" if case.is_host_overfull(node) else ""
        alike.setdefault(text, []).append(case.cluster.nodes[node].name)
    return [f"  offloaded to {list_few(names, 'host')}: {text}" for text, names in alike.items()]


def _draw_bar(share: float) -> str:
    """`[#####-----]`; what is beyond the limit is an exclamation mark."""
    filled = min(_BAR, round(share * _BAR))
    return f"[{'#' * filled}{'-' * (_BAR - filled)}{']' if share <= 1 else '!'}"


def _fullness(case: SimulatedPlan, rank: int) -> float:
    """Share of the limit; where that is not known, bytes."""
    limit = case.limit_bytes(rank)
    return case.peak_bytes[rank] / (limit or 1)


def _describe_peak(case: SimulatedPlan) -> str:
    """What the fullest rank holds at its peak, largest first."""
    fullest = max(range(case.plan.num_ranks), key=lambda rank: _fullness(case, rank))
    walk = case.simulation.memory[fullest]
    held = sorted(walk.at_peak.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{purpose} {show_bytes(num_bytes)}" for purpose, num_bytes in held if num_bytes)
    at = f" at {walk.peak_action.text}" if walk.peak_action is not None else ""
    return f"Fullest is {case.describe_rank(fullest)}{at}: {listed or 'nothing'}."
