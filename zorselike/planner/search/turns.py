"""Whose turn it is: kinds of work that go on side by side, each with its share of all that is done.

Shares are of nominal seconds, which depend on what is done and not on how long it takes here and now. So the
order of work is the same on every machine, with any budget and however many processes help: a budget only
says where in it the search ends (weighted fair queueing; Demers, Keshav, Shenker 1989).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """One kind of work, done piece by piece."""

    def peek(self) -> float | None:
        """Nominal seconds of the next piece, about; None while there is nothing to do."""
        ...

    def advance(self) -> float:
        """Does the next piece; nominal seconds that it was."""
        ...


@dataclass
class _Queue:
    work: Work
    share: float
    done: float = 0.0
    """When it was done with its last piece, in seconds of its share."""
    begin: float | None = None
    """When it begins with the next piece; None while it has none."""


class Turns:
    """Takes pieces of several kinds of work in turns."""

    def __init__(self, works: Sequence[tuple[Work, float]]) -> None:
        """Kinds of work with their shares; of equal turns the first comes first."""
        self._queues = [_Queue(work, share) for work, share in works]
        self._now = 0.0

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.advance():
            pass

    def advance(self) -> bool:
        """Does one piece, of the kind that would be done first; False where there is nothing to do."""
        first: tuple[float, _Queue] | None = None
        for queue in self._queues:
            nominal_s = queue.work.peek()
            if nominal_s is None:
                queue.begin = None
                continue
            if queue.begin is None:  # What had nothing to do does not catch up.
                queue.begin = max(queue.done, self._now)
            end = queue.begin + nominal_s / queue.share
            if first is None or end < first[0]:
                first = end, queue
        if first is None:
            return False
        queue = first[1]
        assert queue.begin is not None, "it has a next piece"
        self._now = max(self._now, queue.begin)
        queue.done = queue.begin + queue.work.advance() / queue.share
        queue.begin = queue.done
        return True
