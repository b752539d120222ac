"""Computation that is slower while its rank communicates."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappush

from zorselike.simulator.network.traffic import Event
from zorselike.simulator.tasks.graph import COMPUTES, Tasks


@dataclass
class _Running:
    """A computation in progress."""

    task: int
    left_s: float
    """Seconds left at `since`, without communication."""
    since: float
    due: float


class Slowdown:
    """Running forwards and backwards, one per rank, and the communication beside each."""

    def __init__(self, tasks: Tasks, factor: float, heap: list[Event]) -> None:
        self._tasks, self._factor, self._heap = tasks, factor, heap
        self._num_beside: dict[int, int] = {}
        self._running: dict[int, _Running] = {}

    def times(self, task: int) -> bool:
        """Whether this object schedules the end of a task."""
        return self._tasks.work[task] in COMPUTES

    def begin(self, now: float, task: int, local: int) -> None:
        """A task begins: `task` counts over all steps, `local` within its step."""
        rank = self._tasks.rank[local]
        if self.times(local) and self._tasks.seconds[local] > 0.0:
            self._running[rank] = _Running(task, self._tasks.seconds[local], now, now)
            self._schedule(rank, now)
        for party in self._tasks.parties.get(local, ()):
            self._change(party, 1, now)

    def end(self, now: float, task: int, local: int) -> None:
        """A task ends."""
        running = self._running.get(self._tasks.rank[local])
        if running is not None and running.task == task:
            del self._running[self._tasks.rank[local]]
        for party in self._tasks.parties.get(local, ()):
            self._change(party, -1, now)

    def is_over(self, now: float, task: int, local: int) -> bool:
        """Whether a task that was due now ends now, not postponed since."""
        if not self.times(local):
            return True
        running = self._running.get(self._tasks.rank[local])
        return running is not None and running.task == task and running.due == now

    def _change(self, rank: int, change: int, now: float) -> None:
        """More or less communication runs beside a rank's computation."""
        before = self._num_beside.get(rank, 0)
        running = self._running.get(rank)
        if running is not None and (before == 0) != (before + change == 0):
            running.left_s -= (now - running.since) / (self._factor if before else 1.0)
            running.since = now
            self._num_beside[rank] = before + change
            self._schedule(rank, now)
        self._num_beside[rank] = before + change

    def _schedule(self, rank: int, now: float) -> None:
        running = self._running[rank]
        factor = self._factor if self._num_beside.get(rank, 0) else 1.0
        running.due = now + max(running.left_s, 0.0) * factor
        heappush(self._heap, (running.due, running.task))
