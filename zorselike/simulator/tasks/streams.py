"""One rank's streams, in the terms of `zorselike/runtime/memory/streams.py`: each runs its tasks in order."""

from __future__ import annotations

from zorselike.simulator.tasks.graph import NOTHING, Tasks, Work


class Stream:
    """A stream of the device, or a thread of the host."""

    def __init__(self, tasks: Tasks, rank: int, name: str, host: Stream | None = None) -> None:
        """`host`: the thread that launches the stream's work; None for a thread."""
        self._tasks, self._rank, self._host = tasks, rank, host
        self._name = (rank, name)
        self.tail = tasks.from_previous_step(self._name)
        self.ran: list[int] = []
        """All its tasks, in order."""
        self._pending: list[int] = []
        self._launched_after = NOTHING
        """Where the host was when it launched the last task."""

    def run(self, task: int) -> int:
        """Appends a task."""
        wait = self._tasks.wait
        wait(task, self.tail)
        if self._pending:
            for awaited in self._pending:
                wait(task, awaited)
            self._pending.clear()
        host = self._host
        if host is not None:
            launch = host.record()
            if launch != self._launched_after:
                wait(task, launch)
                self._launched_after = launch
        self.tail = task
        self.ran.append(task)
        return task

    def work(self, work: Work, seconds: float = 0.0, bundle: int = NOTHING) -> int:
        """Appends a new task of this rank."""
        return self.run(self._tasks.add(work, self._rank, seconds, bundle))

    def wait(self, awaited: int) -> None:
        """What follows waits for `awaited`."""
        if awaited not in (NOTHING, self.tail):
            self._pending.append(awaited)

    def record(self) -> int:
        """The end of everything so far."""
        return self.work(Work.EVENT) if self._pending else self.tail

    def post(self, task: int) -> None:
        """This rank arrives, after everything so far, at a transfer or collective that runs elsewhere."""
        self._tasks.wait(task, self.record())
        if self._host is not None:
            self._tasks.wait(task, self._host.record())
        self._tasks.arrive(task)

    def take_part(self, task: int) -> int:
        """This rank arrives at a transfer or collective that occupies the stream."""
        self._tasks.arrive(task)
        return self.run(task)

    def finish(self) -> None:
        """The next step continues from here."""
        self._tasks.to_next_step(self._name, self.record())


class Streams:
    """A rank's streams; on a CPU rank all are its one thread."""

    def __init__(self, tasks: Tasks, rank: int, *, is_cpu: bool, reduces_beside: bool) -> None:
        """`reduces_beside`: whether reductions have a stream of their own; else they are compute's."""
        self.host = Stream(tasks, rank, "host")
        self._streams: list[Stream] = []

        def make(name: str) -> Stream:
            if is_cpu:
                return self.host
            self._streams.append(Stream(tasks, rank, name, self.host))
            return self._streams[-1]

        self.compute, self.gather, self.update = map(make, ("compute", "gather", "update"))
        self.reduce = make("reduce") if reduces_beside else self.compute
        self.load, self.load_state, self.store = map(make, ("load", "load_state", "store"))
        self.load_activations, self.store_activations = make("load_activations"), make("store_activations")

    def finish(self) -> None:
        for stream in (*self._streams, self.host):
            stream.finish()
