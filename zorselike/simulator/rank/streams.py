"""Lanes of one rank, the host's thread and the device's streams: on each one thing comes after the other."""

from __future__ import annotations

from zorselike.simulator.rank.tasks import NOTHING, Tasks, Work


class Lane:
    """A thread, or a stream that a thread gives work to.

    As in `zorselike/runtime/memory/streams.py`: `join` makes what follows wait for something, `record` names
    the end of all so far.
    """

    def __init__(self, tasks: Tasks, rank: int, name: str, host: Lane | None = None) -> None:
        """`host`: who gives it work; None: it is a thread itself."""
        self._tasks, self._rank, self._host = tasks, rank, host
        self._name = (rank, name)
        self.tail = tasks.carry(self._name)
        self.ran: list[int] = []
        """All that ran on it, in order."""
        self._pending: list[int] = []
        self._seen = NOTHING
        """Up to where the host had come when it gave the last work."""

    def run(self, task: int) -> int:
        """A task comes next."""
        wait = self._tasks.wait
        wait(task, self.tail)
        if self._pending:
            for awaited in self._pending:
                wait(task, awaited)
            self._pending.clear()
        host = self._host
        if host is not None:
            given = host.record()
            if given != self._seen:
                wait(task, given)
                self._seen = given
        self.tail = task
        self.ran.append(task)
        return task

    def work(self, work: Work, seconds: float = 0.0, bundle: int = NOTHING) -> int:
        """A task of this rank comes next."""
        return self.run(self._tasks.add(work, self._rank, seconds, bundle))

    def join(self, awaited: int) -> None:
        """What follows waits for `awaited`."""
        if awaited not in (NOTHING, self.tail):
            self._pending.append(awaited)

    def record(self) -> int:
        """The end of all so far."""
        return self.work(Work.MEETING) if self._pending else self.tail

    def post(self, task: int) -> None:
        """This rank comes to `task`, a meeting that runs elsewhere, after all so far."""
        self._tasks.wait(task, self.record())
        if self._host is not None:
            self._tasks.wait(task, self._host.record())
        self._tasks.arrive(task)

    def meet(self, task: int) -> int:
        """This rank comes to `task`, a meeting that occupies the lane."""
        self._tasks.arrive(task)
        return self.run(task)

    def finish(self) -> None:
        """The step ends, and another follows."""
        self._tasks.fill(self._name, self.record())


class Lanes:
    """All lanes of a rank. A rank that computes by itself has one thread for everything."""

    def __init__(self, tasks: Tasks, rank: int, *, is_cpu: bool) -> None:
        self.host = Lane(tasks, rank, "host")
        if is_cpu:
            self.compute = self.gather = self.update = self.load = self.load_state = self.host
            self.store = self.fetch = self.stash = self.host
            self._all = [self.host]
            return
        names = ("compute", "gather", "update", "load", "load_state", "store", "fetch", "stash")
        streams = [Lane(tasks, rank, name, self.host) for name in names]
        self.compute, self.gather, self.update, self.load = streams[:4]
        self.load_state, self.store, self.fetch, self.stash = streams[4:]
        self._all = [*streams, self.host]

    def finish(self) -> None:
        for lane in self._all:
            lane.finish()
