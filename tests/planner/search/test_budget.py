"""When the parts of a search end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zorselike.planner.search import budget as effort
from zorselike.planner.search.budget import ASSUMED_S, EXPLORING_SHARE, FAR_LATE, GLANCING_SHARE, Effort

BUDGET_S = 10.0


@pytest.fixture
def clock(monkeypatch):
    """Whose `now` is the time of both clocks."""
    own = SimpleNamespace(now=0.0)
    both = SimpleNamespace(monotonic=lambda: own.now, process_time=lambda: own.now)
    monkeypatch.setattr(effort, "time", both)
    return own


def make_effort() -> Effort:
    own = Effort(BUDGET_S, lambda: None)
    own.may_stop = True
    return own


def find_end_of_exploring(clock: SimpleNamespace, own: Effort) -> float:
    """As a share of the budget, to a hundredth."""
    for percent in range(101):
        clock.now = percent / 100 * BUDGET_S
        if own.is_exploring_over():
            return percent / 100
    raise AssertionError("never")


@pytest.mark.parametrize(
    ("long_s", "share"),
    [
        (0.0, EXPLORING_SHARE),
        ((FAR_LATE - EXPLORING_SHARE) * BUDGET_S * 0.98, EXPLORING_SHARE),
        (FAR_LATE * BUDGET_S, GLANCING_SHARE),
        (100 * BUDGET_S, GLANCING_SHARE),
    ],
)
def test_where_the_first_simulation_is_long_it_begins_sooner(clock, long_s, share):
    own = make_effort()
    own.promised_actions = int(long_s / ASSUMED_S)
    assert find_end_of_exploring(clock, own) == pytest.approx(share, abs=0.011)
    assert own.is_cut


def test_before_anything_fits_no_budget_ends_exploring_but_computing_in_vain_does(clock):
    own = make_effort()
    own.may_stop = False
    clock.now = 1.9 * BUDGET_S
    assert not own.is_exploring_over() and not own.is_over() and not own.is_cut
    clock.now = 2.1 * BUDGET_S
    assert own.is_exploring_over() and own.is_over() and own.is_cut


def test_what_was_simulated_says_how_long_the_next_will_take(clock):
    own = make_effort()
    actions = 100_000
    assert not own.must_hurry(actions)  # Two steps, by what is assumed: 3.4 s of 10.
    own.count_simulation(actions=actions, estimated_actions=actions, seconds=8.0, is_one_step=False)
    clock.now = 5.0
    assert not own.would_overrun(actions)  # One step takes 4 s of the 5 that are left,
    assert own.must_hurry(actions)  # and two take 8.
    clock.now = 6.5
    assert own.would_overrun(actions) and own.is_cut
