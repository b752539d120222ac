"""What a process does for its membership, on threads of its own."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from zorselike.elastic.membership import events as e

_WORKED_WITHIN_S = 10.0
"""So long a process that ends waits for them."""


class Threads:
    """Those for which a process that ends waits: Python's end aborts it where one is inside of torch."""

    def __init__(self, post: Callable[[e.Event], object], *, stop: Callable[[], object]) -> None:
        """`post` takes what has come of an effect; `stop`: has no others started."""
        self._post, self._stop = post, stop
        self._threads: list[threading.Thread] = []
        atexit.register(self._end)

    def answer(self, work: Callable[[], e.Event], failed: Callable[[str], e.Event]) -> None:
        """What the pipeline does for a meeting."""

        def run() -> None:
            try:
                event = work()
            except Exception as error:
                name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                event = failed(f"{name}{error}")
            self._post(event)

        self.start(run)

    def start(self, work: Callable[[], object]) -> None:
        thread = threading.Thread(target=work, name="elastic worker", daemon=True)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def _end(self) -> None:
        self._stop()
        until_s = time.monotonic() + _WORKED_WITHIN_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
