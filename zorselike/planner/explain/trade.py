"""What one would give and get by taking another plan than the best."""

from __future__ import annotations

from collections.abc import Iterator

from zorselike.planner.answer import Planned
from zorselike.planner.explain.plans import describe_groups
from zorselike.text.wording import count

_SEEN = 0.005
"""Differences of time and money below this are none."""
_SEEN_MEMORY = 0.02
"""The same of the share of a device's memory."""


def describe_trade(best: Planned, other: Planned) -> str:
    """What the other plan costs beside the best, and what it has in exchange."""
    losses = list(_list_losses(best, other))
    gains = list(_list_gains(best, other))
    what = f"The next best plan ({other.grouping}: {describe_groups(other)})"
    price = f"is {' and '.join(losses)}" if losses else "is as good by time and money"
    if gains:
        return f"{what} {price}; in exchange it {', '.join(gains)}."
    return f"{what} {price}, and has nothing in exchange."


def _list_losses(best: Planned, other: Planned) -> Iterator[str]:
    first, second = best.case.simulation, other.case.simulation
    if second.iteration_s > first.iteration_s * (1 + _SEEN):
        yield f"{second.iteration_s / first.iteration_s - 1:.1%} slower"
    if first.cost and second.cost > first.cost * (1 + _SEEN):
        yield f"{second.cost / first.cost - 1:.1%} dearer"


def _list_gains(best: Planned, other: Planned) -> Iterator[str]:
    first, second = best.case, other.case
    if second.simulation.iteration_s < first.simulation.iteration_s * (1 - _SEEN):
        yield f"is {1 - second.simulation.iteration_s / first.simulation.iteration_s:.1%} faster"
    if second.simulation.cost < first.simulation.cost * (1 - _SEEN):
        yield f"is {1 - second.simulation.cost / first.simulation.cost:.1%} cheaper"
    for noun, before, after in (
        ("device", first.plan.num_ranks, second.plan.num_ranks),
        ("group", len(first.plan.groups), len(second.plan.groups)),
        ("ministage", first.plan.num_ministages, second.plan.num_ministages),
    ):
        if after < before:
            yield f"has {count(after, noun)} in place of {before}"
    before_share, after_share = _fullest(best), _fullest(other)
    if before_share is not None and after_share is not None and after_share < before_share - _SEEN_MEMORY:
        yield f"fills memory to {after_share:.0%} at most in place of {before_share:.0%}"
    if _recomputes(best) and not _recomputes(other):
        yield "recomputes nothing"
    if _offloads(best) and not _offloads(other):
        yield "offloads nothing"


def _fullest(planned: Planned) -> float | None:
    """Share of its memory that the fullest device needs, where memory is known."""
    case = planned.case
    limits = case.costs.memory_bytes
    return max(peak / limit for peak, limit in zip(case.peak_bytes, limits, strict=True)) if limits else None


def _recomputes(planned: Planned) -> bool:
    return any(group.recompute == "layer" for group in planned.case.plan.groups)


def _offloads(planned: Planned) -> bool:
    return any(group.offload for group in planned.case.plan.groups)
