"""What limits a simulated step, and why, in words."""

from __future__ import annotations

from collections.abc import Collection
from statistics import fmean

from zorselike.simulator.result import Track
from zorselike.simulator.simulated_plan import SimulatedPlan

BUSY = 0.85
"""Share of the step from which a computing rank is said to limit it."""
UNBALANCED = 0.15
"""Difference of busy shares, between groups or of one rank to the others, from which work should move."""
BUSY_LINK = 0.6
"""Utilization from which a link is named."""


_WAITS = {
    "waiting_for_data_s": "rows or gradients that other groups have not computed yet",
    "exposed_communication_s": "bytes on links, or the other ranks of a collective",
    "exposed_copies_s": "copies between host and device",
}
"""Kinds of waiting, as attributes of `RankTimes` and in words."""


def describe_limit(simulated: SimulatedPlan) -> list[str]:
    """One to three sentences: the rank that limits, what it does or waits for, and what would help."""
    times = simulated.simulation.ranks
    busiest = max(range(len(times)), key=lambda rank: times[rank].busy_s)
    share = times[busiest].busy_s / simulated.simulation.iteration_s
    sentences = (
        _blame_rank(simulated, busiest, share) if share >= BUSY else _blame_waits(simulated, busiest, share)
    )
    return sentences + _name_busy_links(simulated)


def find_link_shares(simulated: SimulatedPlan) -> dict[str, float]:
    """By name of a link that carries only so much: the share of the step for which it would be full."""
    network, simulation = simulated.costs.network, simulated.simulation
    capacity = dict(zip(network.names, network.capacities, strict=True))
    return {
        name: num_bytes / capacity[name] / simulation.iteration_s
        for name, num_bytes in simulation.bytes_by_link.items()
        if capacity.get(name)
    }


def _blame_rank(simulated: SimulatedPlan, busiest: int, share: float) -> list[str]:
    times, iteration_s = simulated.simulation.ranks, simulated.simulation.iteration_s
    who = f"{simulated.describe_rank(busiest)} limits: it computes {share:.0%} of the step"
    others = [times[rank].busy_s / iteration_s for rank in range(len(times)) if rank != busiest]
    if not others:
        return [f"{who}."]
    rest = f"the other ranks {fmean(others):.0%} on average"
    if share - fmean(others) < UNBALANCED:
        return [
            f"{who}, {rest}: all are busy, and only faster computing would help: larger microbatches, less "
            "recomputation, faster devices."
        ]
    return [f"{who}, {rest}: with fewer rows or layers on it the others would wait less."]


def _blame_waits(simulated: SimulatedPlan, busiest: int, share: float) -> list[str]:
    times, iteration_s = simulated.simulation.ranks, simulated.simulation.iteration_s
    seconds = {wait: [getattr(rank, wait) for rank in times] for wait in _WAITS}
    wait = max(_WAITS, key=lambda each: sum(seconds[each]))
    longest = max(range(len(times)), key=seconds[wait].__getitem__)
    lost = fmean(seconds[wait]) / iteration_s
    sentences = [
        f"Waiting limits: no rank computes more than {share:.0%} of the step "
        f"(most: {simulated.describe_rank(busiest)}).",
        f"Ranks wait {lost:.0%} of the step on average for {_WAITS[wait]}; longest, "
        f"{seconds[wait][longest]:.3g} s, does {simulated.describe_rank(longest)}.",
    ]
    return sentences + _advise(simulated, wait, longest)


def _advise(simulated: SimulatedPlan, wait: str, rank: int) -> list[str]:
    match wait:
        case "waiting_for_data_s":
            return [_compare_groups(simulated)]
        case "exposed_communication_s":
            return [_compare_traffic(simulated, rank)] if simulated.simulation.spans else []
        case _:
            return ["Offloading less, or larger microbatches, would hide them."]


def _compare_traffic(simulated: SimulatedPlan, rank: int) -> str:
    """Whether a rank waits rather for collectives or for transfers."""
    collectives_s = _measure(simulated, rank, ("gather", "reduce"))
    transfers_s = _measure(simulated, rank, ("send", "receive"))
    times = f"Its collectives take {collectives_s:.3g} s, its transfers {transfers_s:.3g} s"
    if collectives_s >= transfers_s:
        return f"{times}: a lower ZeRO stage, or groups that do not span slow links, would move fewer bytes."
    return f"{times}: fewer ministages, or consecutive groups on faster links, would shorten these."


def _measure(simulated: SimulatedPlan, rank: int, tracks: Collection[Track]) -> float:
    """Seconds of the step in which any of these tracks is active; 0 without recorded spans."""
    spans = sorted(simulated.simulation.folded_spans(), key=lambda span: span.start_s)
    seconds = until_s = 0.0
    for span in spans:
        if span.rank == rank and span.track in tracks:
            seconds += max(0.0, span.stop_s - max(span.start_s, until_s))
            until_s = max(until_s, span.stop_s)
    return seconds


def _compare_groups(simulated: SimulatedPlan) -> str:
    """Whether the pipeline is unbalanced, or only fills and drains."""
    shares = {
        number: fmean(simulated.simulation.ranks[rank].busy_s for rank in group.flat_ranks)
        / simulated.simulation.iteration_s
        for number, group in enumerate(simulated.plan.groups)
    }
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    if shares[most] - shares[least] >= UNBALANCED:
        return (
            f"Group {most} computes {shares[most]:.0%} of the step and group {least} {shares[least]:.0%}: "
            f"layers moved from {most} to {least} would balance them."
        )
    if simulated.plan.bounds_in_flight:
        return (
            "The groups are balanced: more microbatches shorten the fill and drain, a larger max_in_flight "
            "the waits between."
        )
    return "The groups are balanced: more microbatches or more ministages shorten the fill and drain."


def _name_busy_links(simulated: SimulatedPlan) -> list[str]:
    shares = find_link_shares(simulated)
    busy = [name for name, share in shares.items() if share >= BUSY_LINK]
    if not busy:
        return []
    fullest = max(busy, key=shares.__getitem__)
    more = f" and {len(busy) - 1} more like it" if len(busy) > 1 else ""
    return [f"The link '{fullest}'{more} is full {shares[fullest]:.0%} of the step."]
