"""When the parts of a search end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zorselike.planner.search import budget as search_budget
from zorselike.planner.search.budget import ASSUMED_S, COARSE_SHARE, ENUMERATION_SHARE, FAR_LATE, SearchBudget

BUDGET_S = 10.0


@pytest.fixture
def clock(monkeypatch):
    """Whose `now` is the time of both clocks."""
    fake = SimpleNamespace(now=0.0)
    both = SimpleNamespace(monotonic=lambda: fake.now, process_time=lambda: fake.now)
    monkeypatch.setattr(search_budget, "time", both)
    return fake


def make_budget() -> SearchBudget:
    budget = SearchBudget(BUDGET_S, lambda: None)
    budget.may_stop = True
    return budget


def find_end_of_enumeration(clock: SimpleNamespace, budget: SearchBudget) -> float:
    """As a share of the budget, to a hundredth."""
    for percent in range(101):
        clock.now = percent / 100 * BUDGET_S
        if budget.is_enumeration_over():
            return percent / 100
    raise AssertionError("never")


@pytest.mark.parametrize(
    ("long_s", "share"),
    [
        (0.0, ENUMERATION_SHARE),
        ((FAR_LATE - ENUMERATION_SHARE) * BUDGET_S * 0.98, ENUMERATION_SHARE),
        (FAR_LATE * BUDGET_S, COARSE_SHARE),
        (100 * BUDGET_S, COARSE_SHARE),
    ],
)
def test_where_the_first_simulation_is_long_it_begins_sooner(clock, long_s, share):
    budget = make_budget()
    budget.count_expected = lambda: int(long_s / ASSUMED_S)
    assert find_end_of_enumeration(clock, budget) == pytest.approx(share, abs=0.011)
    assert budget.is_cut


def test_before_anything_fits_no_budget_ends_exploring_but_computing_in_vain_does(clock):
    budget = make_budget()
    budget.may_stop = False
    clock.now = 1.9 * BUDGET_S
    assert not budget.is_enumeration_over() and not budget.is_over() and not budget.is_cut
    clock.now = 2.1 * BUDGET_S
    assert budget.is_enumeration_over() and budget.is_over() and budget.is_cut


def test_what_was_simulated_says_how_long_the_next_will_take(clock):
    budget = make_budget()
    actions = 100_000
    assert not budget.must_hurry(actions)  # Two steps, by what is assumed: 3.4 s of 10.
    budget.count_simulation(actions=actions, estimated_actions=actions, seconds=8.0, is_one_step=False)
    clock.now = 5.0
    assert not budget.would_overrun(actions)  # One step takes 4 s of the 5 that are left,
    assert budget.must_hurry(actions)  # and two take 8.
    clock.now = 6.5
    assert budget.would_overrun(actions) and budget.is_cut
