"""The most rows that fit, by few trials: Algorithm 1 of Poplar, as it is meant.

Its printed form goes on after an out-of-memory, never ends its bisection, returns the last size that it
tried even if that failed, keeps times of failed steps, and estimates from a forward alone against the
total instead of the free memory. Here a failure bounds the search from above, the bisection ends where
the two bounds meet, the result is a size that was tried and fitted, and the estimate is made of a whole
step, optimizer state included. Pure: what a trial does is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_GUESSES = 3
"""Trials that an estimate chooses and not the doubling or the bisection; more would let an estimate that
is always a little too low creep up row by row."""


@dataclass(frozen=True)
class TrialResult:
    """What one step with some rows gave."""

    fits: bool
    peak_bytes: int = 0
    """The most that it held; 0: not known."""
    limit_bytes: int = 0
    """What it may hold at most; 0: not known."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    kept_bytes: int = 0
    """What the forward left for the backward."""


@dataclass(frozen=True)
class MaxRows:
    """The outcome of a search."""

    trials: tuple[tuple[int, TrialResult], ...]
    """All numbers of rows that were tried, in order."""

    @property
    def max_rows(self) -> int:
        """The most rows that were tried and fitted; 0: not even one."""
        return max((rows for rows, result in self.trials if result.fits), default=0)

    @property
    def refused_rows(self) -> int | None:
        """The fewest rows that were tried and failed; None: all that it was given fitted."""
        return min((rows for rows, result in self.trials if not result.fits), default=None)

    @property
    def measured(self) -> tuple[tuple[int, TrialResult], ...]:
        """Those that fitted, by rising rows: failed sizes leave no times."""
        return tuple(sorted((rows, result) for rows, result in self.trials if result.fits))


def find_max_rows(trial: Callable[[int], TrialResult], *, most_rows: int) -> MaxRows:
    """The most rows, at most `most_rows`, with which `trial` fits.

    One row, then twice as many each time until one fails or an estimate from the two largest stands
    nearer; then bisection between the largest that fitted and the smallest that failed.
    """
    trials: list[tuple[int, TrialResult]] = []
    low, high, has_failed, num_guesses = 0, most_rows + 1, False, 0
    while high - low > 1:
        rows = (low + high) // 2 if has_failed else max(1, min(2 * low, most_rows))
        guess = _estimate(trials)
        if guess is not None and num_guesses < MAX_GUESSES:
            # Where the estimate is what fits already, one more row proves it.
            guess = max(guess, low + 1)
            if guess < (high if has_failed else rows):
                rows, num_guesses = guess, num_guesses + 1
        result = trial(rows)
        trials.append((rows, result))
        if result.fits:
            low = rows
        else:
            high, has_failed = rows, True
    return MaxRows(tuple(trials))


def _estimate(trials: Sequence[tuple[int, TrialResult]]) -> int | None:
    """The most rows that memory has room for, memory being linear in rows: from the two largest that
    fitted; None until there are two."""
    fitted = sorted((rows, result) for rows, result in trials if result.fits and result.peak_bytes)
    if len(fitted) < 2 or not fitted[-1][1].limit_bytes:
        return None
    (few, less), (many, more) = fitted[-2:]
    per_row = (more.peak_bytes - less.peak_bytes) / (many - few)
    return many + int((more.limit_bytes - more.peak_bytes) / per_row) if per_row > 0 else None
