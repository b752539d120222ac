"""Plans and bounds of the benchmark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.plans import lay_rows, make_plan, spread_modules
from zorselike.schedule import ScheduleSpec, build

from second_simulator.actions import Workload, compute_s, simulate

SPEEDS = (4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 1.0)


@given(st.integers(7, 500), st.integers(7, 64), st.integers(1, 7))
def test_laid_rows_cover_the_batch_once(num_rows: int, num_microbatches: int, num_ranks: int) -> None:
    microbatches = lay_rows(dict(enumerate(SPEEDS[:num_ranks])), num_rows, num_microbatches)
    assert [m.start for m in microbatches] == [0, *(m.stop for m in microbatches[:-1])]
    assert microbatches[-1].stop == num_rows
    assert len(microbatches) <= num_microbatches


def test_a_made_plan_is_valid_and_balanced() -> None:
    plan, layers = make_plan(
        [(0, 1), (2, 3), (4, 5, 6)], SPEEDS, (32, 16, 12), num_rows=480, num_microbatches=32, ministages=4
    )
    plan.validate()
    assert [len(group.microbatches) for group in plan.groups] == [32, 32, 32]
    assert layers == (8, 4, 3) * 4


def test_modules_of_a_real_model_are_spread() -> None:
    names = [f"layers.{i}" for i in range(9)]
    plan = spread_modules(names, [(0, 1), (2,)], SPEEDS, num_rows=8, ministages=2, zero=3)
    plan.validate()
    assert [name for stage in plan.ministages for name in stage.modules] == names


def test_a_small_microbatch_costs_as_much_as_two_rows() -> None:
    assert compute_s(1, 3, 0.5) == compute_s(2, 3, 0.5) == 3.0
    assert compute_s(5, 3, 0.5, backward=True) == 15.0


def test_one_group_by_speed_reaches_the_ideal() -> None:
    plan, layers = make_plan([range(7)], SPEEDS, (60,), num_rows=480, num_microbatches=32, ministages=4)
    workload = Workload(tuple(1 / speed for speed in SPEEDS), layers)
    outcome = simulate(plan, build(ScheduleSpec(plan)), workload)
    assert outcome.makespan_s == pytest.approx(workload.ideal_s(480))
    assert min(outcome.busy_share) == pytest.approx(1.0)


@pytest.mark.parametrize("ministages", [1, 2, 3])
@pytest.mark.parametrize("num_groups", [2, 3, 5])
def test_equal_single_ranks_take_what_the_pipeline_formula_says(num_groups: int, ministages: int) -> None:
    speeds = (1.0,) * num_groups
    plan, layers = make_plan(
        [(rank,) for rank in range(num_groups)],
        speeds,
        (6,) * num_groups,
        num_rows=32,
        num_microbatches=8,
        ministages=ministages,
    )
    workload = Workload(speeds, layers)
    microbatch_s = 3 * 4 * 6 / ministages
    expected = microbatch_s * (8 * ministages + num_groups - 1)
    assert simulate(plan, build(ScheduleSpec(plan)), workload).makespan_s == pytest.approx(expected)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_zero_stage_can_be_simulated(zero: int) -> None:
    plan, layers = make_plan(
        [(0, 2), (4, 5, 6)], SPEEDS, (4, 2), num_rows=30, num_microbatches=7, ministages=2, zero=zero
    )
    workload = Workload(tuple(1 / speed for speed in SPEEDS), layers)
    outcome = simulate(
        plan.__class__(**{**plan.__dict__, "groups": plan.groups}), build(ScheduleSpec(plan)), workload
    )
    assert outcome.makespan_s >= workload.ideal_s(30) * 0.99
