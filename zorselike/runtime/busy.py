"""How long a rank computed in a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class BusyClock:
    """Adds up the time of forwards and backwards, which on a GPU events on the compute stream tell, so that
    measuring waits for nothing.

    Waiting for other ranks' rows is not in it. What compute waits for between two layers is: gathers that
    are late (with ZeRO 3 all that do not overlap), offloaded shards and activations that are, and on a GPU
    the host, where it starts kernels more slowly than they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def restart(self) -> None:
        """Starts a step."""
        self._seconds = 0.0
        self._events = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts what happens inside."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        begin, end = (
            torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def seconds(self) -> float:
        """Seconds since `restart`; waits for a GPU to get there."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
            self._events = []
        return self._seconds
