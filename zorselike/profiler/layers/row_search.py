"""The most rows that fit, by few trials: Algorithm 1 of Poplar, as it is meant.

Its printed form goes on after an out-of-memory, never ends its bisection, returns the last size that it
tried even if that failed, keeps times of failed steps, and estimates from a forward alone against the
total instead of the free memory. Here a failure bounds the search from above, the bisection ends where
the two bounds meet, the result is a size that was tried and fitted, and the estimate is made of a whole
step, optimizer state included. Pure: what a trial does is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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

    max_rows: int
    """The most rows that were tried and fitted; 0: not even one."""
    is_limit: bool
    """Whether more were tried and failed; else the search stopped at the rows that it was given."""
    trials: tuple[tuple[int, TrialResult], ...]
    """All of them, in order."""

    @property
    def refused_rows(self) -> int | None:
        """The fewest rows that were tried and failed."""
        return min((rows for rows, result in self.trials if not result.fits), default=None)

    @property
    def measured(self) -> tuple[tuple[int, TrialResult], ...]:
        """Those that fitted, by rising rows: failed sizes leave no times."""
        return tuple(sorted((rows, result) for rows, result in self.trials if result.fits))


@dataclass
class RowSearch:
    """A search that says what to try next and is told how it went, so that ranks can go in step."""

    most_rows: int
    """Beyond this nobody asks."""
    trials: list[tuple[int, TrialResult]] = field(default_factory=list)
    _fits: int = 0
    _fails: int | None = None
    _guesses: int = 0

    def next_rows(self) -> int | None:
        """What to try now; None once the answer is known. The same until `tell` is called."""
        rows = self._choose()
        return None if rows is None else rows[0]

    def tell(self, result: TrialResult) -> None:
        """How the trial of `next_rows()` went."""
        chosen = self._choose()
        assert chosen is not None, "the search is over"
        rows, is_guess = chosen
        self._guesses += is_guess
        self.trials.append((rows, result))
        if result.fits:
            self._fits = rows
        else:
            self._fails = rows

    def outcome(self) -> MaxRows:
        """What is known now."""
        return MaxRows(self._fits, self._fails is not None, tuple(self.trials))

    def _choose(self) -> tuple[int, bool] | None:
        """Rows, and whether an estimate chose them."""
        low, high = self._fits, self._fails
        if low >= self.most_rows or (high is not None and high - low <= 1):
            return None
        if low == 0:
            # One row first, whatever failed: sizes above it are tried only after it fitted.
            return 1, False
        top = self.most_rows + 1 if high is None else high
        usual = min(2 * low, self.most_rows) if high is None else (low + high) // 2
        guess = self._estimate()
        if guess is not None and self._guesses < MAX_GUESSES:
            # Where the estimate is what fits already, one more row proves it.
            guess = max(guess, low + 1)
            if guess < top and (high is not None or guess < usual):
                return guess, True
        return usual, False

    def _estimate(self) -> int | None:
        """The most rows that memory has room for, memory being linear in rows: from the two largest that
        fitted; None until there are two."""
        fitted = sorted((rows, result) for rows, result in self.trials if result.fits and result.peak_bytes)
        if len(fitted) < 2 or not fitted[-1][1].limit_bytes:
            return None
        (few, less), (many, more) = fitted[-2:]
        per_row = (more.peak_bytes - less.peak_bytes) / (many - few)
        if per_row <= 0:
            return None
        return many + int((more.limit_bytes - more.peak_bytes) / per_row)


def find_max_rows(trial: Callable[[int], TrialResult], *, most_rows: int) -> MaxRows:
    """The most rows, at most `most_rows`, with which `trial` fits.

    One row, then twice as many each time until one fails or an estimate from the two largest stands
    nearer; then bisection between the largest that fitted and the smallest that failed. At most
    `max_trials(most_rows)` trials.
    """
    search = RowSearch(most_rows)
    while (rows := search.next_rows()) is not None:
        search.tell(trial(rows))
    return search.outcome()


def max_trials(most_rows: int) -> int:
    """How many trials a search takes at most."""
    return 2 * most_rows.bit_length() + MAX_GUESSES + 1
