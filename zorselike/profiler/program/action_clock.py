"""When each action of a rank began and ended, and what it cost its thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class ActionTime:
    """One action as it ran, in monotonic seconds."""

    action: Action
    begin_s: float
    end_s: float
    cpu_s: float
    """Of the thread that ran it, since the action before it ended."""


@dataclass
class ActionClock:
    """Collects them while `running`."""

    times: list[ActionTime] = field(default_factory=list)

    @contextmanager
    def running(self, pipe: HeteroPipeline) -> Iterator[None]:
        """Inside, the actions of this rank's steps are timed."""
        begin_s, cpu_begin_s = 0.0, time.thread_time()

        def enter(_: Action) -> None:
            nonlocal begin_s
            begin_s = time.monotonic()

        def leave(action: Action) -> None:
            nonlocal cpu_begin_s
            cpu_end_s = time.thread_time()
            self.times.append(ActionTime(action, begin_s, time.monotonic(), cpu_end_s - cpu_begin_s))
            cpu_begin_s = cpu_end_s

        with pipe.watching(enter, leave):
            yield
