"""When a search ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zorselike.planner.search import budget as search_budget
from zorselike.planner.search.budget import ASSUMED_S, FUTILE_S, BudgetOverError, SearchBudget

BUDGET_S = 10.0


@pytest.fixture
def clock(monkeypatch):
    """Whose `now` is the time of both clocks."""
    fake = SimpleNamespace(now=0.0)
    both = SimpleNamespace(monotonic=lambda: fake.now, process_time=lambda: fake.now)
    monkeypatch.setattr(search_budget, "time", both)
    return fake


def make_budget(*, may_stop: bool = True, budget_s: float = BUDGET_S) -> SearchBudget:
    budget = SearchBudget(budget_s, lambda: None)
    budget.may_stop = may_stop
    return budget


def is_over(budget: SearchBudget, num_actions: int = 0) -> bool:
    try:
        budget.check(num_actions)
    except BudgetOverError:
        return True
    return False


def test_a_search_ends_after_its_time_or_before_a_simulation_that_would_end_later(clock):
    budget = make_budget()
    clock.now = 0.9 * BUDGET_S
    assert not is_over(budget)
    few = int(0.05 * BUDGET_S / ASSUMED_S)
    assert not is_over(budget, few) and is_over(budget, 3 * few)
    clock.now = 1.01 * BUDGET_S
    assert is_over(budget)


def test_before_anything_fits_no_budget_ends_it_but_computing_in_vain_does(clock):
    budget = make_budget(may_stop=False)
    clock.now = 1.9 * BUDGET_S
    assert not is_over(budget)
    clock.now = 2.1 * BUDGET_S
    assert is_over(budget)


def test_what_was_found_is_simulated_however_late_it_is(clock):
    budget = make_budget(may_stop=False, budget_s=0.0)
    clock.now = 2 * FUTILE_S
    assert is_over(budget)
    budget.has_found = True
    assert not is_over(budget, 10**9)
    budget.count_simulation(actions=1, expected_actions=1, seconds=1.0)
    assert is_over(budget)


def test_what_was_simulated_says_how_long_the_next_will_take(clock):
    budget = make_budget()
    actions = 100_000
    clock.now = 5.0
    assert not is_over(budget, actions)  # 1.7 s, by what is assumed.
    budget.count_simulation(actions=actions, expected_actions=actions, seconds=6.0)
    assert is_over(budget, actions)


def test_where_nothing_may_end_it_nothing_does(clock):
    budget = make_budget()
    budget.may_end = False
    clock.now = 100 * BUDGET_S
    assert not is_over(budget, 10**9)
