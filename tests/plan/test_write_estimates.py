"""Estimates come into a plan file and leave the rest of it as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zorselike.errors import PlanError
from zorselike.plan.plan import Estimates, Plan
from zorselike.plan.write_estimates import write_estimates

ESTIMATES = Estimates(iteration_s=1.25, peak_memory_bytes=(100, 200), cost_per_iteration=0.5)
HEAD = "# mine\nversion = 1\nglobal_batch = 4\n"
BODY = """
# the fast ones
[[groups]]
ranks = [0, 1]
shares = [[0, 3, 1], [1, 1, 1]]  # by hand

[[ministages]]
group = 0
modules = ["a", "b"]
"""
OLD = """
[estimates]  # of last week
iteration_s = 9.0
peak_memory_bytes = [
    7,
    8,
]
"""


def write(path: Path, text: str) -> tuple[Plan, str]:
    path.write_text(text)
    before = Plan.load(path)
    write_estimates(path, ESTIMATES)
    after = Plan.load(path)
    assert after == replace(before, estimates=ESTIMATES)
    assert after.fingerprint == before.fingerprint
    return after, path.read_text()


def test_new_estimates_come_last_and_comments_stay(tmp_path: Path) -> None:
    _, text = write(tmp_path / "plan.toml", HEAD + BODY)
    assert text.startswith(HEAD + BODY)
    assert text[len(HEAD + BODY) :] == (
        "\n[estimates]\niteration_s = 1.25\ncost_per_iteration = 0.5\npeak_memory_bytes = [100, 200]\n"
    )


@pytest.mark.parametrize("parts", [(HEAD, OLD, BODY), (HEAD, BODY, OLD)])
def test_old_estimates_are_replaced_where_they_are(tmp_path: Path, parts: tuple[str, ...]) -> None:
    _, text = write(tmp_path / "plan.toml", "".join(parts))
    assert text.count("[estimates]") == 1 and "9.0" not in text
    assert "# the fast ones\n[[groups]]" in text and "# by hand" in text and text.startswith(HEAD)
    again = write(tmp_path / "plan.toml", text)[1]
    assert again == text


def test_estimates_in_another_form_of_toml_are_replaced_too(tmp_path: Path) -> None:
    _, text = write(tmp_path / "plan.toml", f"{HEAD}estimates = {{ iteration_s = 9.0 }}\n{BODY}")
    assert "9.0" not in text


def test_all_ranks_need_a_peak(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(HEAD + BODY)
    with pytest.raises(PlanError, match="peak_memory_bytes"):
        write_estimates(tmp_path / "plan.toml", replace(ESTIMATES, peak_memory_bytes=(1,)))
    assert (tmp_path / "plan.toml").read_text() == HEAD + BODY
