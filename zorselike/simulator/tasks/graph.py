"""A step as a graph of tasks: integer tables, built once before the event loop.

A task takes a fixed number of seconds, or until its flows have finished, and starts when all its
predecessors have ended. A stream (or a thread) is a chain of tasks. A dependency on the previous step goes
through a named *slot*, such as the end of a stream, that every step fills.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from zorselike.cost.network import Flow

NOTHING = -1
"""Stands for no task."""
PENDING = -1.0
"""Begin and end of a task that has not run."""


class Work(IntEnum):
    """Kind of a task, for the breakdown of a rank's time."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2
    HOST = 3
    """Work of a host thread."""
    TRANSFER = 4
    COLLECTIVE = 5
    TO_DEVICE = 6
    TO_HOST = 7
    EVENT = 8
    """Takes no time: several predecessors have ended."""


COMPUTES = (Work.FORWARD, Work.BACKWARD)
COPIES = (Work.TO_DEVICE, Work.TO_HOST)


@dataclass
class Tasks:
    """All tasks of one step, of all ranks. Lists are indexed by task."""

    seconds: list[float] = field(default_factory=list)
    bundle: list[int] = field(default_factory=list)
    """Index into `bundles` of the flows that a task consists of, or `NOTHING`."""
    work: list[Work] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    """`NOTHING` where several ranks take part."""
    num_awaited: list[int] = field(default_factory=list)
    """Number of predecessors in this step, and of participants that have not arrived."""
    followers: list[list[int]] = field(default_factory=list)
    bundles: list[tuple[Flow, ...]] = field(default_factory=list)
    parties: dict[int, Sequence[int]] = field(default_factory=dict)
    """Ranks that take part in each transfer or collective."""
    _slots: dict[Hashable, int] = field(default_factory=dict)
    _slot_followers: list[list[int]] = field(default_factory=list)
    """By slot: tasks that wait for what the previous step left in it."""
    _slot_tasks: list[int] = field(default_factory=list)
    """By slot: the task that this step leaves in it, or an earlier slot."""

    def add(self, work: Work, rank: int, seconds: float = 0.0, bundle: int = NOTHING) -> int:
        self.seconds.append(seconds)
        self.bundle.append(bundle)
        self.work.append(work)
        self.rank.append(rank)
        self.num_awaited.append(0)
        self.followers.append([])
        return len(self.seconds) - 1

    def wait(self, task: int, awaited: int) -> None:
        """`task` starts after `awaited`: a task, a slot, or `NOTHING`."""
        if awaited >= 0:
            self.followers[awaited].append(task)
            self.num_awaited[task] += 1
        elif awaited < NOTHING:
            self._slot_followers[-2 - awaited].append(task)

    def arrive(self, task: int) -> None:
        """One of a task's participants arrives, after everything that it made the task wait for."""
        self.num_awaited[task] -= 1

    def from_previous_step(self, name: Hashable) -> int:
        """The slot of that name, to be waited for."""
        if name not in self._slots:
            self._slots[name] = -2 - len(self._slot_followers)
            self._slot_followers.append([])
            self._slot_tasks.append(NOTHING)
        return self._slots[name]

    def to_next_step(self, name: Hashable, task: int) -> None:
        """Leaves a task in the slot of that name."""
        self._slot_tasks[-2 - self.from_previous_step(name)] = task

    def bundle_of(self, flows: tuple[Flow, ...]) -> int:
        self.bundles.append(flows)
        return len(self.bundles) - 1

    def link_steps(self) -> dict[int, list[int]]:
        """Followers of each task in the next step."""
        followers: dict[int, list[int]] = {}
        for task, waiting in zip(self._slot_tasks, self._slot_followers, strict=True):
            if task >= 0 and waiting:
                followers.setdefault(task, []).extend(waiting)
        return followers


@dataclass(frozen=True)
class Times:
    """When each task of each step began and ended, in seconds, indexed step after step."""

    begin: Sequence[float]
    end: Sequence[float]
    cause: Sequence[int]
    """The task whose end started it, or `NOTHING`."""

    def part(self, start: int, stop: int) -> Times:
        """Times of the tasks `[start, stop)`."""
        return Times(self.begin[start:stop], self.end[start:stop], self.cause[start:stop])
