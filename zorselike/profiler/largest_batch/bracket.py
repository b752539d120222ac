"""The most rows that fit, in a handful of trials around what a memory model expects."""

from __future__ import annotations

from dataclasses import dataclass, field

from zorselike.profiler.layers.row_search import MaxRows, TrialResult

MAX_TRIALS = 5


@dataclass
class BracketSearch:
    """Says what to try next and is told how it went, so that ranks can go in step.

    The first trial is what is expected; each later one what the peaks of those that fitted leave room for,
    until one row more was refused.
    """

    expected_rows: int
    row_bytes: int
    """What one row more is expected to take."""
    most_rows: int
    """Beyond this nobody asks."""
    trials: list[tuple[int, TrialResult]] = field(default_factory=list)

    def next_rows(self) -> int | None:
        """What to try now; None once the limit is known, or after `MAX_TRIALS`."""
        outcome = self.outcome()
        low, high = outcome.max_rows, outcome.refused_rows or self.most_rows + 1
        if high - low == 1 or len(self.trials) == MAX_TRIALS:
            return None
        if not self.trials:
            return min(max(1, self.expected_rows), self.most_rows)
        if low == 0:
            return 1
        guess = max(low + 1, self._estimate(outcome))
        if guess < high:
            return guess
        num_refused = len(self.trials) - len(outcome.measured)
        return high - 1 if num_refused < 2 else (low + high) // 2

    def tell(self, rows: int, result: TrialResult) -> None:
        """How a trial went."""
        self.trials.append((rows, result))

    def outcome(self) -> MaxRows:
        """What is known now."""
        return MaxRows(tuple(self.trials))

    def _estimate(self, outcome: MaxRows) -> int:
        """Memory is linear in rows: as it grew between the two largest that fitted, else as expected."""
        rows, largest = outcome.measured[-1]
        if not largest.peak_bytes or not largest.limit_bytes:
            return 2 * rows
        each: float = self.row_bytes
        if len(outcome.measured) > 1:
            fewer, smaller = outcome.measured[-2]
            grown = (largest.peak_bytes - smaller.peak_bytes) / (rows - fewer)
            each = grown if grown > 0 else each
        return rows + int((largest.limit_bytes - largest.peak_bytes) / max(1, each))
