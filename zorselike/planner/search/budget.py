"""How much time a search has, what it has used of it, and when it stops.

Nothing but the stop depends on the time: what is looked at in which order is decided by counts of work
(`turns.py`), so that a longer budget does all that a shorter one does, and then more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_ACTIONS = 12_000_000
"""Simulated in all, about two minutes; and so deterministic."""
FEW_ACTIONS = 1_500_000
"""Up to so many simulated actions, about ten seconds, more candidates are simulated than `MOST_SIMULATED`."""
TINY_ACTIONS = 50_000
"""Up to so many simulated actions, half a second, estimates decide nothing."""
FUTILE_S = 5.0
"""So long at least, and twice the budget, of computing something that fits and is allowed is looked for."""
ASSUMED_S = 1.7e-5
"""For each action of a simulation, before anything was simulated."""
_TOLD_EVERY_S = 0.1


class BudgetOverError(Exception):
    """Ends a search from wherever it is: the best so far is the answer."""


class SearchBudget:
    """Time and simulated actions of one search."""

    def __init__(self, budget_s: float, tell: Callable[[], None]) -> None:
        """`tell` is called every now and then, and may interrupt."""
        self._started_s = time.monotonic()
        self._begun_work_s = time.process_time()
        self._told_s = 0.0
        self._tell = tell
        self.budget_s = budget_s
        self.may_stop = False
        """Once something that fits and keeps the constraints was simulated."""
        self.may_end = True
        """False where something has to be found, however long it takes."""
        self.has_found = False
        """Whether something was found that fits, by estimate."""
        self.num_simulated = 0
        self.actions = 0
        """Actions of all simulations."""
        self._expected_actions = 0
        self._simulating_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def worked_s(self) -> float:
        """What the process computed: a machine that stood still has looked for nothing."""
        return time.process_time() - self._begun_work_s

    def check(self, num_actions: int = 0) -> None:
        """Raises `BudgetOverError` where the budget is over, or would be after a simulation of about so many
        actions. Before anything may be returned only computing in vain ends a search, and nothing does before
        the first that was found is simulated: so there is an answer that a longer budget has as well."""
        self._report()
        if not self.may_end or (self.has_found and not self.num_simulated):
            return
        if self.may_stop:
            is_over = self.elapsed_s + self._expect_s(num_actions) > self.budget_s
        else:
            is_over = self.worked_s > max(FUTILE_S, 2 * self.budget_s)
        if is_over:
            raise BudgetOverError

    def _expect_s(self, num_actions: int) -> float:
        """What simulating so many actions takes, by those before."""
        each_s = self._simulating_s / self._expected_actions if self._expected_actions else ASSUMED_S
        return each_s * num_actions

    @property
    def is_spent(self) -> bool:
        """Whether all that may be simulated was."""
        return self.actions > MOST_ACTIONS

    @property
    def is_tiny(self) -> bool:
        """Whether simulations were so short that all candidates can be."""
        return self.actions <= TINY_ACTIONS

    @property
    def is_little(self) -> bool:
        """Whether simulations were so short that many more are worth while."""
        return self.actions <= FEW_ACTIONS

    def count_simulation(self, *, actions: int, expected_actions: int, seconds: float) -> None:
        """Counts one; `expected_actions` of all its steps were expected."""
        self.num_simulated += 1
        self.actions += actions
        self._expected_actions += expected_actions
        self._simulating_s += seconds

    def _report(self) -> None:
        if self.elapsed_s - self._told_s > _TOLD_EVERY_S:
            self._told_s = self.elapsed_s
            self._tell()
