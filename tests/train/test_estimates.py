"""A run says how far it was from its plan's estimates."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks

from zorselike.plan.plan import Estimates
from zorselike.train.config.config import Metrics
from zorselike.train.report import metrics
from zorselike.train.report.estimates import RankFacts, compare_with_estimates
from zorselike.train.report.metrics import MetricsLog, StepWork

GIB = 2**30
ESTIMATES = Estimates(iteration_s=2.0, peak_memory_bytes=(4 * GIB, 8 * GIB))


def test_a_line_for_every_rank_in_the_plan_s_order() -> None:
    facts = [RankFacts(1, 2.5, 6 * GIB), RankFacts(0, 1.9, None)]
    text = compare_with_estimates(ESTIMATES, facts)
    assert text is not None
    assert text.splitlines() == [
        "the plan's estimates and this run (without the time of the first step):",
        "  rank 0: estimated 2 s per step, measured 1.9 (-5.0 %); estimated 4.0 GiB at most, not measured",
        "  rank 1: estimated 2 s per step, measured 2.5 (+25.0 %); "
        "estimated 8.0 GiB at most, measured 6.0 GiB (-25.0 %)",
    ]


def test_only_what_was_estimated_is_compared() -> None:
    facts = [RankFacts(0, None, 2 * GIB)]
    time_only = compare_with_estimates(Estimates(iteration_s=2.0), facts)
    assert time_only is not None and time_only.endswith("rank 0: estimated 2 s per step, not measured")
    memory_only = compare_with_estimates(Estimates(peak_memory_bytes=(GIB,)), facts)
    assert memory_only is not None
    assert memory_only.endswith("rank 0: estimated 1.0 GiB at most, measured 2.0 GiB (+100.0 %)")
    assert compare_with_estimates(Estimates(cost_per_iteration=1.0), facts) is None


@dataclass(frozen=True)
class Result:
    loss: float = 1.0
    grad_norm: float = 1.0
    is_skipped: bool = False


class Clock:
    """Time that passes when told."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def log_steps(rank: int, world_size: int, durations_s: list[float]) -> list[float | None]:
    """What is known of the step's time after each step."""
    clock = Clock()
    metrics.time = clock  # type: ignore[attr-defined]
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    log = MetricsLog(
        Metrics(log_freq=2),
        rank=0,
        steps=len(durations_s),
        work=StepWork(num_tokens=1, model_flops=1, hardware_flops=1),
        peak_flops=None,
        device=torch.device("cpu"),
        group=group,
        writers=[],
    )
    found = []
    for step, duration_s in enumerate(durations_s, 1):
        log.begin_step()
        clock.now += duration_s
        log.end_step(Result())
        if log.is_due(step):
            log.log(step, lr=0.1, busy_s=0.1, loss_scale=None)
        facts = log.facts()
        assert facts.rank == 0 and facts.peak_bytes is None
        found.append(facts.step_s)
    return found


def test_the_first_step_s_time_does_not_count(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(log_steps, 1, [100.0, 1.0, 2.0, 3.0, 4.0])
    assert found == [None, 1.0, 1.0, pytest.approx(2.0), pytest.approx(2.5)]
