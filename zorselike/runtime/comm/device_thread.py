"""A thread that waits for a device and for other ranks, so that the executor need not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

T = TypeVar("T")

ABANDON_S = 5.0
"""How long who gives up may wait for a thread whose connections have ended."""


class DeviceThread:
    """Does one thing after the other.

    Its current device is the rank's: a thread that calls CUDA without one opens a context on card 0. A
    process that ends does not wait for it, since what it waits for may never come.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._due: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"zorselike-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Has this done after what was submitted before."""
        future: Future[T] = Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._due.put(do)
        return future

    def close(self) -> None:
        """Waits until all is done."""
        self._due.put(None)
        self._thread.join()

    def abandon(self) -> bool:
        """Drops what has not begun; whether the thread has ended within `ABANDON_S`."""
        with suppress(Empty):
            while True:
                self._due.get_nowait()
        self._due.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(ABANDON_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (do := self._due.get()) is not None:
            do()
            del do  # It may hold memory.
