"""A clock for the planner's searches that counts how often they look at it: the same on every machine."""

from __future__ import annotations

LOOK_S = 0.003
WORKED_S = 0.01
"""Of a search that has found nothing yet."""


class CountedTime:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._worked_s = 0.0

    def monotonic(self) -> float:
        self._now_s += LOOK_S
        return self._now_s

    def process_time(self) -> float:
        self._worked_s += WORKED_S
        return self._worked_s
