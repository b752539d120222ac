"""A run held against its plan's estimates (`zorselike simulate --write-estimates`), rank by rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zorselike.plan.plan import Estimates

_GIB = 2**30


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
            parts.append(_compare("s per step", estimates.iteration_s, own.step_s))
        if estimates.peak_memory_bytes:
            planned = estimates.peak_memory_bytes[own.rank] / _GIB
            found = None if own.peak_bytes is None else own.peak_bytes / _GIB
            parts.append(_compare("GiB at most", planned, found))
        lines.append(f"  rank {own.rank}: {'; '.join(parts)}")
    return "\n".join(lines)


def _compare(unit: str, estimate: float, fact: float | None) -> str:
    """`estimated 1.2 s per step, found 1.3 (+8.3 %)`."""
    if fact is None:
        return f"estimated {estimate:.4g} {unit}, found no number"
    error = f" ({100 * (fact / estimate - 1):+.1f} %)" if estimate else ""
    return f"estimated {estimate:.4g} {unit}, found {fact:.4g}{error}"
