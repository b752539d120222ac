"""Device memory that is given up once something else is over."""

from __future__ import annotations

from collections import deque
from typing import Any

from zorselike.runtime.memory.host_backed import HostBackedTensors
from zorselike.runtime.memory.streams import Event, Stream


class PendingOffloads:
    """Mirrors on their way to the host, freed one ministage later.

    Freeing at once would make the loading stream wait for the copy to the host, so that copies each
    way took turns; a ministage later the copy is over, and nobody waits.
    """

    def __init__(self) -> None:
        self._leaving: deque[tuple[list[HostBackedTensors], Event]] = deque()

    def add(self, tensors: list[HostBackedTensors], gone: Event) -> None:
        """`gone`: the end of their copies to the host."""
        self.settle(keep=0)
        self._leaving.append((tensors, gone))

    def settle(self, *, keep: int = 0) -> None:
        """Frees all but the newest `keep` entries."""
        while len(self._leaving) > keep:
            leaving, gone = self._leaving.popleft()
            for tensors in leaving:
                tensors.free(gone)


class DeferredFrees:
    """Tensors that nobody needs any more once an event is over: their last references."""

    def __init__(self) -> None:
        self._kept: list[tuple[Stream, Event, Any]] = []

    def add(self, home: Stream, last_use: Event, tensors: Any) -> None:
        """`home`: the stream on which they were allocated."""
        self._kept.append((home, last_use, tensors))

    def settle(self) -> None:
        """Drops all, after their home streams wait for their last uses."""
        for home, last_use, _ in self._kept:
            home.wait(last_use)
        self._kept.clear()
