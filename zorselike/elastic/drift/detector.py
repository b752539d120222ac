"""Cards that have become slower than they were, told from noise: heat, a neighbour, a clock that was lowered.

Each rank's computing time of a step is divided by what it was when the generation began, and by how much the
ranks' times have changed in common: what slows all of them, longer rows for instance, is nobody's drift. A
rank drifts if nearly all of its last steps were slower by more than `LEAST`, and by more than its own noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

LEAST = 1.15
"""What is slower by less is not worth a plan."""
NUM_SKIPPED = 2
"""Steps at the start that are slower than others: memory is taken, kernels are chosen."""
NUM_FIRST = 10
"""Steps that say how fast a rank is."""
NUM_LAST = 8
"""Steps that are looked at,"""
NUM_SLOW = 7
"""of which so many must be slow; one spike in between does not hide a drift, several make none."""
_NOISES = 3.0
"""By how many times its usual deviation a step must be slow."""


class Drift(NamedTuple):
    """A rank that has become slower."""

    rank: int
    factor: float
    """How many times longer it computes than when the generation began, compared with the others."""


@dataclass
class DriftDetector:
    """Told of every step of a generation; the same on every rank that is told the same."""

    num_ranks: int
    _first: list[list[float]] = field(default_factory=list, init=False)
    _num_seen: int = field(default=0, init=False)
    _own: tuple[float, ...] = field(default=(), init=False)
    """Seconds of each rank's usual step."""
    _noise: tuple[float, ...] = field(default=(), init=False)
    """How far its steps are from that, as a share."""
    _last: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=NUM_LAST), init=False)

    def note(self, busy_s: Sequence[float]) -> list[Drift]:
        """The computing seconds of every rank in a step; who drifts now."""
        if len(busy_s) != self.num_ranks:
            raise ValueError(f"{len(busy_s)} times for {self.num_ranks} ranks")
        self._num_seen += 1
        if self._num_seen <= NUM_SKIPPED:
            return []
        if not self._own:
            self._first.append(list(busy_s))
            if len(self._first) == NUM_FIRST:
                self._learn()
            return []
        self._last.append(self._compare(busy_s))
        return [] if len(self._last) < NUM_LAST else list(self._judge())

    def _learn(self) -> None:
        by_rank = list(zip(*self._first, strict=True))
        self._own = tuple(map(median, by_rank))
        ratios = list(zip(*map(self._compare, self._first), strict=True))
        self._noise = tuple(median(abs(ratio - 1) for ratio in own) for own in ratios)

    def _compare(self, busy_s: Sequence[float]) -> tuple[float, ...]:
        """By rank: slower than it was, by what others are not. Who computes nothing is as fast as before."""
        pairs = enumerate(zip(busy_s, self._own, strict=True))
        ratios = {i: now / own for i, (now, own) in pairs if own > 0}
        found = [1.0] * self.num_ranks
        for i, ratio in ratios.items():
            others = [other for j, other in ratios.items() if j != i]
            found[i] = ratio / (median(others) or 1.0) if others else ratio
        return tuple(found)

    def _judge(self) -> Iterable[Drift]:
        for rank in range(self.num_ranks):
            ratios = [step[rank] for step in self._last]
            limit = max(
                LEAST, 1 + _NOISES * 1.5 * self._noise[rank]
            )  # 1.5 median deviations are about one sigma.
            if sum(ratio > limit for ratio in ratios) >= NUM_SLOW:
                yield Drift(rank, median(ratios))
