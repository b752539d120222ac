"""The comparison of the closed form with the simulator: its plans, and its figures."""

from __future__ import annotations

import random

import pytest

from tools.rank_closed_form import Scores, draw_plan, make_cluster, score_plans, summarise


def test_plans_differ_and_are_valid() -> None:
    rng = random.Random(1)
    names = [f"layers.{i}" for i in range(35)]
    plans = [plan for _ in range(20) if (plan := draw_plan(make_cluster(), names, rng)) is not None]
    assert len({plan.fingerprint for plan in plans}) == len(plans) > 10
    assert {len(plan.groups) for plan in plans} == {1, 2, 3, 6}
    assert all([name for m in plan.ministages for name in m.modules] == names for plan in plans)


def test_scores_come_from_both_models() -> None:
    (scores,) = score_plans(1, random.Random(2))
    assert 0.3 < scores.closed_form_s / scores.simulated_s < 1.5


def test_figures() -> None:
    scores = [Scores(float(i), float(i)) for i in range(1, 6)]
    summary = summarise([*scores[1:], Scores(0.5, 2.0), scores[0]])
    assert summary.num_plans == 6
    assert summary.regret == {1: 1.0, 5: 0.0}
    assert summary.min_ratio == 0.25 and summary.max_ratio == 1.0
    assert summarise(scores).spearman == pytest.approx(1.0)
