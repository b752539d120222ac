"""What picks plans for emulated clusters, and scores their runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tools import check_emulated, check_planned
from tools.check_planned import CLUSTERS, PlanRun, choose, find_score, list_misses, list_wishes, settle
from tools.emulation.scenarios import make_cluster, make_profile, make_workload
from zorselike.planner.problem import PlanProblem

from planner_oracle.every_plan import Options, Shape, make_plan

OPTIONS = Options(zero=2, grad_reduce="once", recompute="none", offload=(), rows_per_microbatch=2)


def make_problem() -> PlanProblem:
    scenario = CLUSTERS[1]
    workload = make_workload(scenario)
    return PlanProblem(
        workload=workload,
        cluster=make_cluster(scenario),
        profile=make_profile(scenario, workload, 0.1),
        global_batch=scenario.num_rows,
    )


def test_a_settled_plan_takes_as_long_as_before() -> None:
    """Of six devices four, in an order that is not the cluster's."""
    problem = make_problem()
    plan = make_plan(problem, Shape(((5, 1), (2, 3)), ((7, 11), (9, 9)), (2, 3, 3, 2)), OPTIONS)
    settled, cluster = settle(plan, problem.cluster)
    assert settled.devices == ()
    assert [node.name for node in cluster.nodes] == ["n0", "n1", "n2"]
    assert cluster.num_devices == settled.num_ranks == 4
    before = problem.setting.simulate(plan).simulation.iteration_s
    after = replace(problem, cluster=cluster).setting.simulate(settled).simulation.iteration_s
    assert after == pytest.approx(before, rel=1e-12)


def test_wishes_are_questions_that_may_be_asked() -> None:
    wishes = dict(list_wishes(make_problem()))
    assert len(wishes) > 10
    for problem in wishes.values():
        problem.check()


def candidates(*seconds: float, bounded: float | None = None) -> list[Any]:
    return [
        SimpleNamespace(predicted_s=each, plan=SimpleNamespace(bounds_in_flight=each == bounded))
        for each in seconds
    ]


@pytest.mark.parametrize(
    ("tool", "options", "why"),
    [
        (check_planned, ["--only", "nothing"], "no name holds that; there are two nodes; three nodes"),
        (check_planned, ["--steps", "0"], "argument --steps: 0: give a whole number, 1 or more"),
        (check_planned, ["--budget", "nan"], "argument --budget: nan: give seconds, more than 0"),
        (check_emulated, ["--only", "nothing"], "error: --only nothing: no name holds that; there are "),
        (check_emulated, ["--runs", "-1"], "argument --runs: -1: give a whole number, 1 or more"),
    ],
)
def test_names_and_numbers_are_checked_before_the_machine_is_measured(
    tool: Any,
    options: list[str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tool, "measure_constants", lambda: pytest.fail("the machine is measured"))
    with pytest.raises(SystemExit) as ended:
        tool.main(options)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_plans_are_chosen_evenly_and_not_too_slow() -> None:
    chosen = choose(candidates(1.0, 1.01, 1.02, 1.4, 2.0, 2.02, 2.8, 9.0), 4)
    assert [own.predicted_s for own in chosen] == [1.0, 1.4, 2.0, 2.8]


def test_one_with_bounds_in_flight_is_chosen() -> None:
    chosen = choose(candidates(1.0, 1.01, 1.02, 1.4, 2.0, 2.02, 2.8, 9.0, bounded=1.01), 4)
    assert [own.predicted_s for own in chosen] == [1.0, 1.01, 2.0, 2.8]


def runs(*pairs: tuple[float, float]) -> list[PlanRun]:
    return [PlanRun(candidates(predicted)[0], (measured,), measured, None) for predicted, measured in pairs]


def test_scores_of_runs() -> None:
    good = find_score(runs((1.0, 1.02), (1.5, 1.5), (2.5, 2.4)))
    assert good.spearman == pytest.approx(1.0)
    assert good.mean_error == pytest.approx((1 - 1 / 1.02 + 0.1 / 2.4) / 3)
    assert good.regret == 0.0
    assert good.spread == 2.5
    assert list_misses(good) == []


def test_each_target_can_be_missed() -> None:
    assert list_misses(find_score(runs((1.0, 1.2), (2.5, 3.0)))) == ["mean error 16.7%, not at most 5%"]
    (miss,) = list_misses(find_score(runs((1.0, 1.0), (1.5, 1.5))))
    assert "spread over a factor of 1.50" in miss
    wrong = list_misses(find_score(runs((1.0, 1.04), (1.01, 1.0), (2.1, 2.1))))
    assert any("4.0% slower than the best run" in miss for miss in wrong)
    assert any("Spearman 0.500" in miss for miss in wrong)
