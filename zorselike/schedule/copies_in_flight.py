"""When compute waits for copies of activations to the host, because it wants their memory: one rule, which
the runtime follows and the memory walk and the simulator foresee."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from zorselike.schedule.contract import COPIES_IN_FLIGHT

T = TypeVar("T")


class CopiesInFlight(Generic[T]):
    """Copies that have begun and were not waited for, oldest first. Whoever takes some waits for them and
    gives their memory back.

    Room is made by the oldest, but not by one that nothing was computed beside yet: in forwards and backwards
    in turn each wait would be for the copy that has just begun, and nothing would hide any.
    """

    def __init__(self) -> None:
        self._copies: deque[T] = deque()
        self._num_new = 0
        """Begun since the last computation."""

    def take_before_another(self) -> list[T]:
        """All that are too many for another to begin."""
        return self._take(len(self._copies) - COPIES_IN_FLIGHT + 1)

    def add(self, copy: T) -> None:
        """One that has begun."""
        self._copies.append(copy)
        self._num_new += 1

    def note_computed(self) -> None:
        """After each forward and backward."""
        self._num_new = 0

    def take_for_room(self) -> list[T]:
        """The oldest, if any: before a copy to the device, and before a backward."""
        return self._take(min(1, len(self._copies) - self._num_new))

    def take_all(self) -> list[T]:
        """At the end of a step."""
        return self._take(len(self._copies))

    def _take(self, number: int) -> list[T]:
        return [self._copies.popleft() for _ in range(number)]
