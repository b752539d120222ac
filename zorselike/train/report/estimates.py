"""A run compared with its plan's estimates (`zorselike simulate --write-estimates`), rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zorselike.plan.plan import Estimates
from zorselike.text.wording import show_bytes


@dataclass(frozen=True)
class RankFacts:
    """Measurements of a run on one rank."""

    rank: int
    """Rank in the plan."""
    step_s: float | None
    """Mean over all steps but the first; None if there was only one."""
    peak_bytes: int | None
    """Peak memory of the process on its GPU; None on a CPU rank, where nothing counts it."""


def compare_with_estimates(estimates: Estimates, facts: Iterable[RankFacts]) -> str | None:
    """A table of estimates and measurements; None if the plan has no estimates.

    All ranks have the same estimate of time, since they step together.
    """
    if estimates.iteration_s is None and not estimates.peak_memory_bytes:
        return None
    lines = ["the plan's estimates and this run (without the time of the first step):"]
    for fact in sorted(facts, key=lambda each: each.rank):
        parts = []
        if estimates.iteration_s is not None:
            parts.append(_compare(estimates.iteration_s, fact.step_s, "{:.4g}".format, "s per step"))
        if estimates.peak_memory_bytes:
            estimate = estimates.peak_memory_bytes[fact.rank]
            parts.append(_compare(estimate, fact.peak_bytes, show_bytes, "at most"))
        lines.append(f"  rank {fact.rank}: {'; '.join(parts)}")
    return "\n".join(lines)


def _compare(estimate: float, fact: float | None, show: Callable[[float], str], suffix: str) -> str:
    measured = "not measured"
    if fact is not None:
        error = f" ({100 * (fact / estimate - 1):+.1f} %)" if estimate else ""
        measured = f"measured {show(fact)}{error}"
    return f"estimated {show(estimate)} {suffix}, {measured}"
