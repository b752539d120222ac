"""When each action of a rank began and ended, and what it cost its thread: read off the executor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from zorselike.runtime.executor import Executor
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
    def running(self) -> Iterator[None]:
        """Inside, every executor of this process is timed."""
        run_action = Executor._do
        times = self.times
        cpu_begin_s = time.thread_time()

        def timed(self: Executor, action: Action, run: Any) -> None:
            nonlocal cpu_begin_s
            begin_s = time.monotonic()
            run_action(self, action, run)
            cpu_end_s = time.thread_time()
            times.append(ActionTime(action, begin_s, time.monotonic(), cpu_end_s - cpu_begin_s))
            cpu_begin_s = cpu_end_s

        Executor._do = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            Executor._do = run_action  # type: ignore[method-assign]
