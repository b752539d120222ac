"""What each process of a job notes as it happens, so that it is known though the process is killed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from zorselike.elastic.contract import Generation, Reason


class Writer:
    """Appends to one process's file, an event a line, each written at once."""

    def __init__(self, path: Path, member: int, id: str) -> None:
        self._file = path.open("a", buffering=1)
        self._note("is", member, os.getpid(), id)

    def _note(self, what: str, *values: object) -> None:
        self._file.write(json.dumps([what, time.monotonic(), *values]) + "\n")

    def enter(self, generation: Generation) -> None:
        """A generation was handed over, and is to be formed."""
        is_planned = generation.after_step is not None
        source = generation.decision["source"]
        if is_planned:
            source = generation.decision["generation"], generation.after_step
        self._note("enters", generation.number, generation.reason, is_planned, generation.ranks, source)

    def form(self, generation: int, seconds: float) -> None:
        """Its groups and its pipeline were made, in so long."""
        self._note("formed", generation, seconds)

    def run(self, generation: int) -> None:
        """It is filled everywhere, and runs."""
        self._note("runs", generation)

    def finish(self, step: int, generation: int) -> None:
        """A step is done, with its mirrors; before a planned change that follows."""
        self._note("finishes", step, generation)

    def lose(self, step: int, loss: float) -> None:
        """That step is done for good, with this loss."""
        self._note("loss", step, loss)


class Entered(NamedTuple):
    """A generation that a process was to take part in."""

    number: int
    at_s: float
    reason: Reason
    is_planned: bool
    ids: tuple[str, ...]
    """Of its ranks."""
    source: tuple[int, int] | None = None
    """A generation, and the step from whose state it begins; None: from no rank's memory."""


@dataclass
class Diary:
    """One process's."""

    member: int = -1
    pid: int = 0
    id: str = ""
    entered: list[Entered] = field(default_factory=list)
    formed_s: dict[int, float] = field(default_factory=dict)
    """By generation: how long it took to make its groups and its pipeline."""
    ran: set[int] = field(default_factory=set)
    finished: list[tuple[int, float, int]] = field(default_factory=list)
    """Steps, when they were done, and in which generation."""
    losses: list[tuple[int, float, float]] = field(default_factory=list)
    """Steps, when that was known, and the loss."""

    @classmethod
    def read(cls, path: Path) -> Diary:
        """What a file has; its last line may be half there."""
        diary = cls()
        for line in path.read_text().splitlines():
            try:
                what, at_s, *values = json.loads(line)
            except ValueError:
                continue
            match what:
                case "is":
                    diary.member, diary.pid, diary.id = values
                case "enters":
                    number, reason, is_planned, ids, source = values
                    begins = None if source is None else (source[0], source[1])
                    diary.entered.append(Entered(number, at_s, reason, is_planned, tuple(ids), begins))
                case "formed":
                    diary.formed_s[values[0]] = values[1]
                case "runs":
                    diary.ran.add(values[0])
                case "finishes":
                    diary.finished.append((values[0], at_s, values[1]))
                case "loss":
                    diary.losses.append((values[0], at_s, values[1]))
        return diary

    def goes_on_after(self, at_s: float) -> float | None:
        """When this process has done its first step of a later generation than ran at that time; None if it
        had not done any by then, or none follows."""
        before = max((g for _, when, g in self.finished if when < at_s), default=0)
        later = [when for _, when, g in self.finished if when > at_s and g > before]
        return min(later) if before and later else None

    def pauses(self) -> Iterator[tuple[Entered, float]]:
        """Of each planned change: the generation that followed, and the time from the last step before it to
        the first after."""
        entered = {each.number: each for each in self.entered}
        for (step, then, old), (next_step, now, new) in pairwise(self.finished):
            if old != new and next_step == step + 1 and entered[new].is_planned:
                yield entered[new], now - then

    def steps_s(self) -> Iterator[float]:
        """Of each step that followed another one in the same generation."""
        for (_, then, old), (_, now, new) in pairwise(self.finished):
            if old == new:
                yield now - then
