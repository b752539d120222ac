"""The check of README's loop: its plans, what it reads of a run, and its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_loop
from tools.check_loop import CASES, Case, LoopError, Pair, change_plan, mean_error, read_comparison, summarise
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.train.report.estimates import RankFacts, compare_with_estimates

MODULES = ("tok_embeddings", *(f"layers.{i}" for i in range(6)), "norm", "output")


def shares_plan(case: Case) -> Plan:
    """As `plan --shares` makes it for two equal ranks."""
    microbatches = tuple(
        Microbatch(start // case.rows_per_microbatch % 2, start, start + case.rows_per_microbatch)
        for start in range(0, case.global_batch, case.rows_per_microbatch)
    )
    group = Group(ranks=(0, 1), microbatches=microbatches, zero=case.zero, recompute=case.recompute)
    return Plan(case.global_batch, (group,), (Ministage(0, MODULES),)).validate()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_is_a_plan_of_all_rows_and_layers(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    shares_plan(case).save(path)
    change_plan(path, case)
    plan = Plan.load(path)
    assert tuple(plan.ministage_of) == MODULES
    assert {group.zero for group in plan.groups} == {case.zero}
    rows = {rank: sum(m.num_rows for m in plan.microbatches_of_rank(rank)) for rank in (0, 1)}
    if case.in_line:
        assert rows == {0: case.global_batch, 1: case.global_batch}
        assert plan.num_ministages == 2 * case.ministages
    else:
        assert sum(rows.values()) == case.global_batch
        assert case.rows_of_rank_0 in (None, rows[0])


def test_what_a_run_says_at_its_end_is_read() -> None:
    plan = shares_plan(CASES["1 ministage"])
    estimates = type(plan.estimates)(iteration_s=0.5)
    said = compare_with_estimates(estimates, [RankFacts(0, 0.25, None), RankFacts(1, 1.0, 5)])
    assert said is not None
    assert read_comparison(f"step: 40\n{said}\nended") == (0.5, 1.0)
    with pytest.raises(LoopError, match="does not compare"):
        read_comparison("ended after 40 of 40 steps")


def test_no_more_ranks_than_cores_are_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_loop, "num_cores", lambda: 4)
    assert check_loop.parse(["--ranks", "4"]).ranks == 4
    with pytest.raises(SystemExit):
        check_loop.parse(["--ranks", "5"])
    assert "--ranks 5 is more than this machine's 4 cores" in capsys.readouterr().err


def test_figures_are_of_medians() -> None:
    found = {
        "a": [Pair(1.1, 1.0, 0.0), Pair(9.0, 1.0, 0.0), Pair(1.2, 1.0, 0.0)],
        "b": [Pair(0.9, 1.0, None)],
    }
    assert mean_error(found) == pytest.approx(0.15)
    text = summarise(found)
    assert "mean error 15.0%, worst 20.0%" in text and "NOT REACHED" in text and "others" not in text
    noisy = {"a": [Pair(1.05, 1.0, 0.5)]}
    assert ", reached" in summarise(noisy) and "run this on a quiet one" in summarise(noisy)


def test_a_command_that_fails_says_what_it_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = check_loop.Loop(tmp_path, 2)
    with pytest.raises(LoopError, match=r"plan\.toml"):
        loop._zorselike("simulate", "plan.toml")
