"""Who limits a simulated step, and why, in words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean

from zorselike.simulator.report.window import fold_spans
from zorselike.simulator.result import RankTimes, Track
from zorselike.simulator.simulated_plan import SimulatedPlan

BUSY = 0.85
"""From this share of the step on, a rank that computes sets the pace."""
UNBALANCED = 0.15
"""Difference of busy shares between groups, or of a rank to the others, from which there is work to move."""
BUSY_LINK = 0.6
"""From this share of what it can carry on, a link is named."""


@dataclass(frozen=True)
class _Wait:
    """A way in which ranks lose time."""

    attribute: str
    what: str


_WAITS = (
    _Wait("waiting_for_data_s", "rows or gradients that other groups have not computed yet"),
    _Wait("exposed_communication_s", "bytes on wires, or the others of a collective"),
    _Wait("exposed_copies_s", "copies between host and device"),
)


def describe_limit(case: SimulatedPlan) -> list[str]:
    """One to three sentences: the rank that limits, what it does or waits for, and what would mend it."""
    times = case.simulation.ranks
    busiest = max(range(len(times)), key=lambda rank: times[rank].busy_s)
    share = times[busiest].busy_s / case.simulation.iteration_s
    sentences = _blame_rank(case, busiest, share) if share >= BUSY else _blame_waits(case, busiest, share)
    return sentences + _name_busy_links(case)


def _blame_rank(case: SimulatedPlan, busiest: int, share: float) -> list[str]:
    times, iteration_s = case.simulation.ranks, case.simulation.iteration_s
    who = f"{case.describe_rank(busiest)} limits: it computes {share:.0%} of the step"
    others = [times[rank].busy_s / iteration_s for rank in range(len(times)) if rank != busiest]
    if not others:
        return [f"{who}."]
    rest = f"the other ranks {fmean(others):.0%} on average"
    if share - fmean(others) < UNBALANCED:
        return [
            f"{who}, {rest}: all work, and only shorter computing would help: larger microbatches, less "
            "recomputation, faster devices."
        ]
    return [f"{who}, {rest}: with fewer rows or layers for it the others would wait less."]


def _blame_waits(case: SimulatedPlan, busiest: int, share: float) -> list[str]:
    times, iteration_s = case.simulation.ranks, case.simulation.iteration_s
    wait = max(_WAITS, key=lambda each: sum(_seconds(rank, each) for rank in times))
    longest = max(range(len(times)), key=lambda rank: _seconds(times[rank], wait))
    lost = fmean(_seconds(rank, wait) for rank in times) / iteration_s
    sentences = [
        f"Waiting limits: no rank computes more than {share:.0%} of the step "
        f"(most: {case.describe_rank(busiest)}).",
        f"Ranks wait {lost:.0%} of the step on average for {wait.what}; longest, "
        f"{_seconds(times[longest], wait):.3g} s, does {case.describe_rank(longest)}.",
    ]
    return sentences + _advise(case, wait, longest)


def _seconds(times: RankTimes, wait: _Wait) -> float:
    seconds: float = getattr(times, wait.attribute)
    return seconds


def _advise(case: SimulatedPlan, wait: _Wait, rank: int) -> list[str]:
    match wait.attribute:
        case "waiting_for_data_s":
            return [_compare_groups(case)]
        case "exposed_communication_s":
            return [_compare_traffic(case, rank)] if case.simulation.spans else []
        case _:
            return ["Offloading less, or larger microbatches, would hide them."]


def _compare_traffic(case: SimulatedPlan, rank: int) -> str:
    """Whether collectives or transfers are what a rank waits for."""
    collectives_s = _measure(case, rank, ("gather", "reduce"))
    transfers_s = _measure(case, rank, ("send", "receive"))
    times = f"Its collectives take {collectives_s:.3g} s, its transfers {transfers_s:.3g} s"
    if collectives_s >= transfers_s:
        return f"{times}: a lower ZeRO stage, or groups that do not span slow links, would move fewer bytes."
    return f"{times}: fewer ministages, or groups in turn on faster links, would shorten these."


def _measure(case: SimulatedPlan, rank: int, tracks: Collection[Track]) -> float:
    """Seconds of the step in which something of these tracks goes on; 0 without recorded spans."""
    spans = [span for span in fold_spans(case.simulation) if span.rank == rank and span.track in tracks]
    seconds = until_s = 0.0
    for span in sorted(spans, key=lambda each: each.start_s):
        seconds += max(0.0, span.stop_s - max(span.start_s, until_s))
        until_s = max(until_s, span.stop_s)
    return seconds


def _compare_groups(case: SimulatedPlan) -> str:
    """Whether the pipeline is out of balance, or only fills and drains."""
    shares = {
        number: fmean(case.simulation.ranks[rank].busy_s for rank in group.flat_ranks)
        / case.simulation.iteration_s
        for number, group in enumerate(case.plan.groups)
    }
    most, least = max(shares, key=lambda g: shares[g]), min(shares, key=lambda g: shares[g])
    if shares[most] - shares[least] >= UNBALANCED:
        return (
            f"Group {most} computes {shares[most]:.0%} of the step and group {least} {shares[least]:.0%}: "
            f"layers moved from {most} to {least} would balance them."
        )
    if case.plan.bounds_in_flight:
        return (
            "The groups are in balance: more microbatches shorten the fill and drain, a larger max_in_flight "
            "the waits between."
        )
    return "The groups are in balance: more microbatches or more ministages shorten the fill and drain."


def _name_busy_links(case: SimulatedPlan) -> list[str]:
    network, simulation = case.costs.network, case.simulation
    capacity = dict(zip(network.names, network.capacities, strict=True))
    shares = {
        name: num_bytes / capacity[name] / simulation.iteration_s
        for name, num_bytes in simulation.bytes_by_link.items()
        if capacity.get(name)
    }
    busy = [name for name, share in shares.items() if share >= BUSY_LINK]
    if not busy:
        return []
    fullest = max(busy, key=lambda name: shares[name])
    more = f" and {len(busy) - 1} more like it" if len(busy) > 1 else ""
    return [f"The link '{fullest}'{more} is full {shares[fullest]:.0%} of the step."]
