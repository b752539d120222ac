"""How much of its budget a search has used, and when its parts must end."""

from __future__ import annotations

import time
from collections.abc import Callable

COARSE_SHARE, ENUMERATION_SHARE = 0.35, 0.6
"""Shares of the budget, after which first no more groupings are estimated coarsely, then none is refined: the
best are simulated."""
FAR_LATE = 1.25
"""Budgets after which no simulation should end: where that of the best so far would, nothing is looked at
closely any more once coarse estimates are over."""
MOST_ACTIONS = 12_000_000
"""Simulated in all, about two minutes; and so deterministic."""
FEW_ACTIONS = 1_500_000
"""Up to so many simulated actions, about ten seconds, more candidates are simulated than `MOST_SIMULATED`."""
FUTILE_S = 5.0
"""So long at least, and twice the budget, of computing something that fits and is allowed is looked for."""
MANY_ACTIONS = 50_000
"""From so many actions on a simulation takes seconds, and one step may have to do in place of several."""
ASSUMED_S = 1.7e-5
"""For each action of one simulated step, before anything was simulated."""
SEVERAL_STEPS = 2.0
"""How many times as long as one step a simulation of several takes."""
TINY_ACTIONS = 50_000
"""Up to so many simulated actions, half a second, estimates decide nothing."""
_TOLD_EVERY_S = 0.1


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
        """Once something fits and keeps the constraints."""
        self.is_cut = False
        """Whether time, and so not the question alone, decided what was looked at."""
        self.count_expected: Callable[[], int] = lambda: 0
        """Counts the actions of what will be simulated first, as far as is known; is asked when that matters,
        for it may take a while."""
        self.num_simulated = 0
        self.actions = 0
        """Actions of all simulations."""
        self._estimated_actions = 0
        self._simulating_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def worked_s(self) -> float:
        """What the process computed: a machine that stood still has looked for nothing."""
        return time.process_time() - self._begun_work_s

    def is_past(self, share: float) -> bool:
        """Whether a share of the budget is over."""
        self._report()
        if not self.may_stop:
            return self._is_futile()
        return self._cut(self.elapsed_s > share * self.budget_s)

    def _cut(self, is_late: bool) -> bool:
        self.is_cut = self.is_cut or is_late
        return is_late

    def _is_futile(self) -> bool:
        return self._cut(self.worked_s > max(FUTILE_S, 2 * self.budget_s))

    def is_enumeration_over(self) -> bool:
        """Whether it is time to simulate what was found."""
        if self.may_stop and self.elapsed_s <= COARSE_SHARE * self.budget_s:
            self._report()
            return False
        expected = self.count_expected()
        if expected >= MANY_ACTIONS and self._end_s(expected, 1.0) > FAR_LATE * self.budget_s:
            return self.is_past(COARSE_SHARE)
        return self.is_past(ENUMERATION_SHARE)

    def is_over(self) -> bool:
        """Whether the budget is, or all that may be simulated was."""
        self._report()
        if not self.may_stop:
            return self._is_futile()
        return self._cut(self.elapsed_s > self.budget_s) or self.actions > MOST_ACTIONS

    def is_tiny(self) -> bool:
        """Whether simulations were so short that all candidates can be."""
        return self.actions <= TINY_ACTIONS

    def is_little(self) -> bool:
        """Whether simulations were so short that many more are worth while."""
        return self.actions <= FEW_ACTIONS

    def would_overrun(self, num_actions: int) -> bool:
        """Whether a simulation of about so many actions would end after the budget, by those before."""
        times = 1.0 if num_actions >= MANY_ACTIONS else SEVERAL_STEPS
        return self._cut(self._end_s(num_actions, times) > self.budget_s)

    def must_hurry(self, num_actions: int) -> bool:
        """Whether a long simulation had better be of one step only."""
        return num_actions >= MANY_ACTIONS and self._end_s(num_actions, SEVERAL_STEPS) > self.budget_s

    def _end_s(self, num_actions: int, times: float) -> float:
        """When a simulation would end that begins now and takes `times` one of one step."""
        each_s = self._simulating_s / self._estimated_actions if self._estimated_actions else ASSUMED_S
        return self.elapsed_s + times * each_s * num_actions

    def count_simulation(
        self, *, actions: int, estimated_actions: int, seconds: float, is_one_step: bool
    ) -> None:
        self.num_simulated += 1
        self.is_cut = self.is_cut or is_one_step
        self.actions += actions
        self._estimated_actions += estimated_actions
        self._simulating_s += seconds if is_one_step else seconds / SEVERAL_STEPS

    def _report(self) -> None:
        if self.elapsed_s - self._told_s > _TOLD_EVERY_S:
            self._told_s = self.elapsed_s
            self._tell()
