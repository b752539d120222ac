"""The contest of tensor parallelisms compares runs that do the same work."""

from __future__ import annotations

import math

import pytest
from ranks import RunRanks

from tools.bench_tensor_parallel import Job, Times, run

pytestmark = pytest.mark.pooled


def run_small(rank: int, world_size: int, job: Job) -> tuple[list[float], list[float]]:
    return run(rank, job)


@pytest.mark.parametrize(("num_replicas", "degree"), [(1, 2), (2, 2)])
def test_both_compute_the_same(num_replicas: int, degree: int, run_ranks: RunRanks) -> None:
    """`run` compares their losses, before and after an update."""
    job = Job(num_replicas, degree, dim=32, num_rounds=2, num_layers=1, length=16, rows=2, num_steps=1)
    for ours, theirs in run_ranks(run_small, job.num_ranks, job):
        assert all(math.isfinite(seconds) and seconds > 0 for seconds in ours + theirs)
        assert len(ours) == len(theirs) == 2


def test_the_ratio_is_of_rounds_beside_each_other() -> None:
    assert Times((1.0, 2.0, 4.0), (1.0, 3.0, 4.0)).ratio == 1.0
