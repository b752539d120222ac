"""Cards that become slower are told from noise, and the planner gives them less."""

from __future__ import annotations

import random

import pytest
import volume
from device_problems import make_nodes, make_problem

from zorselike.elastic.drift.detector import NUM_FIRST, NUM_SKIPPED, Drift, DriftDetector
from zorselike.elastic.drift.slowed import slow_down, with_own_types
from zorselike.errors import ClusterError
from zorselike.plan.cluster.device_types import at_speed, require_device_type, split_speed
from zorselike.plan.plan import Plan
from zorselike.planner.search.search import search_plans

BEFORE = NUM_SKIPPED + NUM_FIRST


def noisy(rng: random.Random, usual_s: float, sigma: float = 0.06, spikes: float = 0.04) -> float:
    """A step on a machine where others work, too: one in 25 takes up to three times as long."""
    return usual_s * rng.lognormvariate(0.0, sigma) * (rng.uniform(1, 3) if rng.random() < spikes else 1.0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", volume.part(range(100)))
def test_a_noisy_machine_is_no_drift_in_a_thousand_steps(seed: int) -> None:
    rng = random.Random(seed)
    usual = [rng.uniform(0.01, 2.0) for _ in range(8)]
    detector = DriftDetector(len(usual))
    for step in range(1000):
        common = 1.0 + 0.5 * (step > 500)  # Longer rows from here on.
        assert detector.note([common * noisy(rng, own) for own in usual]) == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", volume.part(range(100)))
def test_a_card_that_slows_is_found_in_ten_steps(seed: int) -> None:
    rng = random.Random(seed)
    usual = [rng.uniform(0.01, 2.0) for _ in range(rng.randint(2, 8))]
    factor, begins = rng.uniform(1.6, 4.0), rng.randint(BEFORE, 200)
    slow = rng.randrange(len(usual))
    detector = DriftDetector(len(usual))
    for _ in range(begins):
        assert detector.note([noisy(rng, own, 0.03) for own in usual]) == []
    for _ in range(10):
        found = detector.note(
            [noisy(rng, own * (factor if rank == slow else 1.0), 0.03) for rank, own in enumerate(usual)]
        )
        if found:
            break
    assert [drift.rank for drift in found] == [slow]
    assert found[0].factor == pytest.approx(factor, rel=0.15)


def test_what_all_share_and_who_idles_is_nobody_s_drift() -> None:
    detector = DriftDetector(3)
    for step in range(100):
        assert detector.note([1.0 + (step > 50), 2.0 + 2 * (step > 50), 0.0]) == []


def test_the_slower_of_two_is_named() -> None:
    detector = DriftDetector(2)
    found = [detector.note([1.0, 1.0 if step < 30 else 1.5]) for step in range(60)]
    assert found[-1] == [Drift(1, 1.5)]
    with pytest.raises(ValueError, match="1 times for 2 ranks"):
        detector.note([1.0])


@pytest.mark.parametrize("nodes", ["T4 T4", "A100-40 T4"])
def test_a_slowed_card_gets_fewer_rows(nodes: str) -> None:
    problem = make_problem(make_nodes("n", nodes, copies=2), global_batch=56)
    slowed = slow_down(problem, {1: 2.0})
    assert slow_down(problem, {}) is problem
    before, after = (search_plans(each, budget_s=0.3, top=1).best.case for each in (problem, slowed))
    plan = with_own_types(after.plan)
    assert {device.type for device in plan.devices} == set(nodes.split())
    plain = problem.setting.simulate(plan)  # Fits the cluster as it is called.
    assert plain.simulation.iteration_s <= after.simulation.iteration_s * (1 + 1e-9)

    def rows_of_slow(plan: Plan) -> float:
        return sum(
            microbatch.num_rows * len(ministage.modules)
            for group in plan.groups
            for microbatch in group.microbatches
            for ministage in plan.ministages
            if plan.groups[ministage.group] is group
            for device in plan.devices
            if device.rank == microbatch.rank and (device.node, device.local_rank) == ("n0", 1)
        )

    assert rows_of_slow(plan) < rows_of_slow(before.plan)


def test_types_at_a_share_of_their_speed() -> None:
    assert at_speed("T4", 0.5) == "T4@0.50" and split_speed("T4@0.50") == ("T4", 0.5)
    assert at_speed("T4@0.50", 0.25) == "T4@0.25" and split_speed("T4") == ("T4", 1.0)
    require_device_type("T4@0.50")
    for wrong in ("T4@", "T4@0.00", "T4@1.5", "T5@0.50", "T4@-0.5", "@0.50"):
        with pytest.raises(ClusterError, match="no device type"):
            require_device_type(wrong)
