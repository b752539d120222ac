"""A run held against its plan's estimates (`zorselike simulate --write-estimates`), rank by rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zorselike.plan.plan import Estimates
from zorselike.text.wording import show_bytes


@dataclass(frozen=True)
class RankFacts:
    """What a run came to on one rank."""

    rank: int
    """Of the plan."""
    step_s: float | None
    """Mean over all steps but the first; None if there was no other."""
    peak_bytes: int | None
    """The most that the process has held of its GPU; None on a CPU rank, where nothing counts it."""


def compare_with_estimates(estimates: Estimates, facts: Iterable[RankFacts]) -> str | None:
    """A table of estimates and facts; None where the plan has no estimates.

    The time estimate is one for all ranks, since they step together.
    """
    if estimates.iteration_s is None and not estimates.peak_memory_bytes:
        return None
    lines = ["estimates of the plan against this run (the first step's time left out):"]
    for own in sorted(facts, key=lambda each: each.rank):
        parts = []
        if estimates.iteration_s is not None:
            parts.append(_compare_time(estimates.iteration_s, own.step_s))
        if estimates.peak_memory_bytes:
            parts.append(_compare_memory(estimates.peak_memory_bytes[own.rank], own.peak_bytes))
        lines.append(f"  rank {own.rank}: {'; '.join(parts)}")
    return "\n".join(lines)


def _compare_time(estimate_s: float, fact_s: float | None) -> str:
    found = "not found" if fact_s is None else f"found {fact_s:.4g}{_error(estimate_s, fact_s)}"
    return f"estimated {estimate_s:.4g} s per step, {found}"


def _compare_memory(estimate: int, fact: int | None) -> str:
    found = "not counted" if fact is None else f"found {show_bytes(fact)}{_error(estimate, fact)}"
    return f"estimated {show_bytes(estimate)} at most, {found}"


def _error(estimate: float, fact: float) -> str:
    return f" ({100 * (fact / estimate - 1):+.1f} %)" if estimate else ""
