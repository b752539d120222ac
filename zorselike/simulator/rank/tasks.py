"""A step as tasks that wait for each other: integer tables, made once before the event loop.

A task takes fixed seconds, or until its flows are over, and starts once all that it waits for has
ended. Lanes (a thread, a stream) are tasks in a chain. What a task of the next step waits for is named
by a *carry*: a place, such as the end of a lane, that each step fills.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from zorselike.cost.network import Flow

NOTHING = -1
"""Stands for no task."""


class Work(IntEnum):
    """What a task is, for the account of a rank's time."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2
    HOST = 3
    """A thread of the host works."""
    TRANSFER = 4
    COLLECTIVE = 5
    TO_DEVICE = 6
    TO_HOST = 7
    MEETING = 8
    """Takes no time: several things are over."""


COMPUTES = (Work.FORWARD, Work.BACKWARD)
COPIES = (Work.TO_DEVICE, Work.TO_HOST)


@dataclass
class Tasks:
    """All tasks of one step, of all ranks."""

    seconds: list[float] = field(default_factory=list)
    bundle: list[int] = field(default_factory=list)
    """Of each task the flows that it consists of, in `bundles`, or `NOTHING`."""
    work: list[Work] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    """Whose it is; `NOTHING` where several ranks take part."""
    num_awaited: list[int] = field(default_factory=list)
    """Of each task: tasks of this step, and parties that have not come."""
    followers: list[list[int]] = field(default_factory=list)
    bundles: list[tuple[Flow, ...]] = field(default_factory=list)
    parties: dict[int, Sequence[int]] = field(default_factory=dict)
    """Ranks that take part in a transfer or collective."""
    _carries: dict[Hashable, int] = field(default_factory=dict)
    _carried: list[list[int]] = field(default_factory=list)
    """By carry: the tasks that wait for what the step before has put there."""
    _filled: list[int] = field(default_factory=list)
    """By carry: the task that this step puts there, or an earlier carry."""

    def add(self, work: Work, rank: int, seconds: float = 0.0, bundle: int = NOTHING) -> int:
        self.seconds.append(seconds)
        self.bundle.append(bundle)
        self.work.append(work)
        self.rank.append(rank)
        self.num_awaited.append(0)
        self.followers.append([])
        return len(self.seconds) - 1

    def wait(self, task: int, awaited: int) -> None:
        """`task` starts after `awaited`: a task, a carry, or `NOTHING`."""
        if awaited >= 0:
            self.followers[awaited].append(task)
            self.num_awaited[task] += 1
        elif awaited < NOTHING:
            self._carried[-2 - awaited].append(task)

    def arrive(self, task: int) -> None:
        """A party comes to a task that expects it, after what it has made that wait for."""
        self.num_awaited[task] -= 1

    def carry(self, name: Hashable) -> int:
        """What the step before has put at a place."""
        if name not in self._carries:
            self._carries[name] = -2 - len(self._carried)
            self._carried.append([])
            self._filled.append(NOTHING)
        return self._carries[name]

    def fill(self, name: Hashable, task: int) -> None:
        """What this step puts there."""
        self._filled[-2 - self.carry(name)] = task

    def bundle_of(self, flows: tuple[Flow, ...]) -> int:
        self.bundles.append(flows)
        return len(self.bundles) - 1

    def link_steps(self) -> dict[int, list[int]]:
        """By task: its followers in the next step."""
        followers: dict[int, list[int]] = {}
        for task, waiting in zip(self._filled, self._carried, strict=True):
            if task >= 0 and waiting:
                followers.setdefault(task, []).extend(waiting)
        return followers
