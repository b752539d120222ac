"""One page on a simulated step: how fast it is, compared with what, what limits it, and what fits."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from zorselike.schedule.orders import DEFAULT_ORDER
from zorselike.simulator.report.limits import describe_limit
from zorselike.simulator.simulated_plan import Baseline, SimulatedPlan
from zorselike.text.layout import align_columns, wrap_prose
from zorselike.text.wording import count, list_few, show_bytes, show_numbers

_BAR = 20
"""Characters of a full memory bar."""
_MOST_LINES = 24
"""Most lines of the table of ranks; ranks with the most free memory are left out."""


def format_report(
    simulated: SimulatedPlan,
    baselines: Sequence[Baseline],
    *,
    ideal_s: float,
    notes: Sequence[str] = (),
    width: int = 100,
) -> str:
    """The page, in lines of at most `width` characters where numbers allow it.

    Args:
        ideal_s: the step if all devices computed all the time.
        notes: what a reader must know before any number.
    """
    sections = [
        [describe_job(simulated), *notes],
        _compare(simulated, baselines, width),
        _describe_step(simulated, ideal_s),
        describe_limit(simulated),
        _list_ranks(simulated),
        _list_assumptions(simulated),
    ]
    return "\n\n".join(wrap_prose("\n".join(section), width) for section in sections if section)


def describe_job(simulated: SimulatedPlan) -> str:
    plan, workload, cluster = simulated.plan, simulated.workload, simulated.cluster
    where = f" on cluster {cluster.name}" if cluster.name else ""
    order = "" if simulated.schedule == DEFAULT_ORDER else f", schedule {simulated.schedule}"
    frozen = f" ({told})" if (told := workload.describe_frozen()) else ""
    return (
        f"plan {plan.fingerprint}{where}: {workload.model}{frozen}, {workload.dtype}, "
        f"{count(plan.global_batch, 'row')} of {workload.sequence_length:,} tokens a step, "
        f"{count(plan.num_ranks, 'rank')} in {count(len(plan.groups), 'group')}, "
        f"{count(plan.num_ministages, 'ministage')}{order}"
    )


# -- against what ------------------------------------------------------------------------------


def _compare(simulated: SimulatedPlan, baselines: Sequence[Baseline], width: int) -> list[str]:
    """This plan and the baselines, a line each, or two where a line is too long."""
    rows = [("this plan", *_show_speed(simulated), _show_overfull(simulated))]
    for other in baselines:
        if other.simulated is None:
            rows.append((other.name, "", "", other.reason))
            continue
        ratio = other.simulated.simulation.iteration_s / simulated.simulation.iteration_s
        rows.append(
            (other.name, *_show_speed(other.simulated), f"plan is {ratio:.2f} x as fast ({other.how})")
        )
    numbers = [f"  {line}" for line in align_columns([row[:-1] for row in rows], left=(0,))]
    column = max(map(len, numbers)) + 2
    lines = []
    for number, (*_, note) in zip(numbers, rows, strict=True):
        line = f"{number:{column}}{note}".rstrip()
        lines += [line] if len(line) <= width else [number, *_indent(note, width)]
    return lines


def _indent(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")


def _show_speed(simulated: SimulatedPlan) -> tuple[str, str]:
    return f"{simulated.simulation.iteration_s:.4g} s per step", f"{simulated.tokens_per_s:,.0f} tokens/s"


def _show_overfull(simulated: SimulatedPlan) -> str:
    ranks = [rank for rank in range(simulated.plan.num_ranks) if simulated.is_overfull(rank)]
    hosts = [node for node in simulated.host_bytes if simulated.is_host_overfull(node)]
    parts = [f"{'rank' if len(ranks) == 1 else 'ranks'} {show_numbers(ranks)}"] if ranks else []
    parts += [list_few([simulated.cluster.nodes[node].name for node in hosts], "host")] if hosts else []
    return f"OUT OF MEMORY on {' and '.join(parts)}" if parts else ""


def _describe_step(simulated: SimulatedPlan, ideal_s: float) -> list[str]:
    simulation = simulated.simulation
    lines = [
        f"share of the ideal: {ideal_s / simulation.iteration_s:.1%} ({ideal_s:.4g} s if all devices "
        "computed all the time, every layer once, in microbatches of their best size)"
    ]
    if simulation.cost or simulation.egress_cost:
        tokens = simulated.plan.global_batch * simulated.workload.sequence_length
        currency = simulated.costs.currency
        egress = f", of it {simulation.egress_cost:.4g} for traffic between zones"
        lines.append(
            f"money: {simulation.cost:.4g} {currency} per step{egress if simulation.egress_cost else ''}; "
            f"{simulation.cost / tokens * 1e9:,.2f} {currency} per 10^9 tokens"
        )
    return lines


def _list_assumptions(simulated: SimulatedPlan) -> list[str]:
    assumed = [f"- {text}" for text in simulated.costs.assumptions]
    corrected = [f"Memory as measured: {text}" for text in simulated.costs.memory_corrections]
    return [*(["Not measured, so assumed:"] if assumed else []), *assumed, *corrected]


# -- ranks -------------------------------------------------------------------------------------


def _list_ranks(simulated: SimulatedPlan) -> list[str]:
    """Table of times and memory by rank; ranks with equal lines share one."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in range(simulated.plan.num_ranks):
        alike.setdefault(_describe_rank(simulated, rank), []).append(rank)
    shown = sorted(alike.items(), key=lambda item: -_fullness(simulated, item[1][0]))[:_MOST_LINES]
    shown.sort(key=lambda item: item[1][0])
    heading = ("rank", "device", "group", "computes", "data", "links", "copies", "memory", "", "")
    table = [heading, *((show_numbers(ranks), *cells) for cells, ranks in shown)]
    lines = [f"  {line}" for line in align_columns(table, left=(0, 1, 7, 9))]
    left_out = sum(len(ranks) for ranks in alike.values()) - sum(len(ranks) for _, ranks in shown)
    if left_out:
        lines.append(f"  {count(left_out, 'more rank')}, each with more room than these")
    legend = "computes, and waits for data, links and copies: shares of the step."
    return [*lines, *_list_hosts(simulated), f"{legend} {_describe_peak(simulated)}"]


def _describe_rank(simulated: SimulatedPlan, rank: int) -> tuple[str, ...]:
    times, iteration_s = simulated.simulation.ranks[rank], simulated.simulation.iteration_s
    waits = (times.waiting_for_data_s, times.exposed_communication_s, times.exposed_copies_s)
    peak, limit = simulated.peak_bytes[rank], simulated.limit_bytes(rank)
    of_limit = "" if limit is None else f"of {show_bytes(limit)}"
    return (
        simulated.device_types[rank],
        str(simulated.plan.group_of_rank[rank]),
        *(f"{seconds / iteration_s:.0%}" for seconds in (times.busy_s, *waits)),
        "" if limit is None else _draw_bar(peak / limit),
        show_bytes(peak),
        of_limit + (" OUT OF MEMORY" if simulated.is_overfull(rank) else ""),
    )


def _list_hosts(simulated: SimulatedPlan) -> list[str]:
    """Host memory used by offloading and by an elastic job's copies, by node; nodes with equal numbers share
    a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for node, num_bytes in sorted(simulated.host_bytes.items()):
        limit = simulated.cluster.nodes[node].host_memory_bytes
        mirrored = simulated.mirror_bytes.get(node, 0)
        what = "offloaded to"
        if mirrored:
            what = (
                "offloaded, copied and mirrored to" if simulated.offloaded_bytes else "copied and mirrored to"
            )
        text = show_bytes(num_bytes) + ("" if limit is None else f" of {show_bytes(limit)}")
        text += " OUT OF MEMORY" if simulated.is_host_overfull(node) else ""
        alike.setdefault((what, text), []).append(simulated.cluster.nodes[node].name)
    return [f"  {what} {list_few(names, 'host')}: {text}" for (what, text), names in alike.items()]


def _draw_bar(share: float) -> str:
    """`[#####-----]`, ending in an exclamation mark above the limit."""
    filled = min(_BAR, round(share * _BAR))
    return f"[{'#' * filled}{'-' * (_BAR - filled)}{']' if share <= 1 else '!'}"


def _fullness(simulated: SimulatedPlan, rank: int) -> float:
    """Share of the limit, or bytes if that is unknown."""
    limit = simulated.limit_bytes(rank)
    return simulated.peak_bytes[rank] / (limit or 1)


def _describe_peak(simulated: SimulatedPlan) -> str:
    """What the fullest rank holds at its peak, largest first."""
    fullest = max(range(simulated.plan.num_ranks), key=lambda rank: _fullness(simulated, rank))
    walk = simulated.simulation.memory[fullest]
    held = sorted(walk.at_peak.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{purpose} {show_bytes(num_bytes)}" for purpose, num_bytes in held if num_bytes)
    at = f" at {walk.peak_action.text}" if walk.peak_action is not None else ""
    return f"Fullest is {simulated.describe_rank(fullest)}{at}: {listed or 'nothing'}."
