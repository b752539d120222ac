"""Which of two plans is better."""

from __future__ import annotations

from zorselike.planner.search.score import WORST, Score


def test_what_is_allowed_comes_before_what_is_not():
    assert Score(0.0, 9.0, 9.0) < Score(0.1, 1.0, 1.0)


def test_less_of_what_is_wanted_comes_first_then_of_the_rest():
    assert Score(0.0, 1.0, 9.0) < Score(0.0, 2.0, 1.0)
    assert Score(0.0, 1.0, 1.0) < Score(0.0, 1.0, 2.0)
    assert Score(0.0, 1.0, 1.0, 3) < Score(0.0, 1.0, 1.0 + 1e-12, 4)


def test_everything_comes_before_the_worst():
    assert Score(0.0, 1.0, 1.0, 64) < WORST
    assert Score(1e9, 1e9, 1e9) < WORST
