"""A run says how far it was from its plan's estimates."""

from __future__ import annotations

from zorselike.plan.plan import Estimates
from zorselike.train.estimates import RankFacts, compare_with_estimates

GIB = 2**30
ESTIMATES = Estimates(iteration_s=2.0, peak_memory_bytes=(4 * GIB, 8 * GIB))


def test_a_line_for_every_rank_in_the_plan_s_order() -> None:
    facts = [RankFacts(1, 2.5, 6 * GIB), RankFacts(0, 1.9, None)]
    text = compare_with_estimates(ESTIMATES, facts)
    assert text is not None
    assert text.splitlines() == [
        "estimates of the plan against this run (the first step's time left out):",
        "  rank 0: estimated 2 s per step, found 1.9 (-5.0 %); estimated 4 GiB at most, found no number",
        "  rank 1: estimated 2 s per step, found 2.5 (+25.0 %); estimated 8 GiB at most, found 6 (-25.0 %)",
    ]


def test_only_what_was_estimated_is_compared() -> None:
    facts = [RankFacts(0, None, 2 * GIB)]
    time_only = compare_with_estimates(Estimates(iteration_s=2.0), facts)
    assert time_only is not None and time_only.endswith("rank 0: estimated 2 s per step, found no number")
    memory_only = compare_with_estimates(Estimates(peak_memory_bytes=(GIB,)), facts)
    assert memory_only is not None
    assert memory_only.endswith("rank 0: estimated 1 GiB at most, found 2 (+100.0 %)")
    assert compare_with_estimates(Estimates(cost_per_iteration=1.0), facts) is None
