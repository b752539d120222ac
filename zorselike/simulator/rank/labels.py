"""What one rank's tasks are called, for spans and for the times of its actions."""

from __future__ import annotations

from typing import NamedTuple

from zorselike.simulator.rank.tasks import NOTHING
from zorselike.simulator.result import Track

_LASTING = frozenset({"compute", "reduce", "update", "host"})
"""Tracks of what an action does itself; other things it only starts."""


class Note(NamedTuple):
    """A task as it is drawn."""

    track: Track
    task: int
    position: int
    """Of its action in the rank's list."""


class Mark(NamedTuple):
    """An action's first and last task, `NOTHING` where it has none, and what the rank computed before it."""

    first: int
    last: int
    before: int


class Notes:
    """Of one rank, taken while its program is made."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.marks: list[Mark] = []
        self._position = 0
        self._before = NOTHING
        self._noted = 0

    def begin(self, position: int, before: int) -> None:
        """An action follows; `before`: what its rank computed last."""
        self._position, self._before = position, before
        self._noted = len(self.notes)

    def add(self, track: Track, task: int) -> None:
        """A task of the action."""
        self.notes.append(Note(track, task, self._position))

    def end(self) -> None:
        """The action has entered all its tasks."""
        own = [note.task for note in self.notes[self._noted :] if note.track in _LASTING]
        first, last = (own[0], own[-1]) if own else (NOTHING, NOTHING)
        self.marks.append(Mark(first, last, self._before))
