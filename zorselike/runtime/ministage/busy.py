"""How long a rank computed in a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class BusyClock:
    """Adds up the time of forwards and backwards, which on a GPU events on the compute stream tell, so that
    measuring waits for nothing.

    Waiting for other ranks' rows is not in it, nor for gathers, shards and activations that are late, nor
    for the other ranks of a tensor-parallel replica. What remains: in backwards with ZeRO 3 what FSDP2
    gathers and reduces by itself without overlap, and on a GPU the host, where it starts kernels more slowly
    than they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[_Span] = []
        self._is_running = False
        self._wait_began: float | torch.cuda.Event | None = None

    def restart(self) -> None:
        """Starts a step."""
        self._seconds = 0.0
        self._spans = []
        self._is_running, self._wait_began = False, None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts what happens inside."""
        began = self._now()
        self._is_running = True
        try:
            yield
        finally:
            self._is_running, self._wait_began = False, None
        self._add(began, 1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Takes off what happens inside, wherever something is counted."""
        self.begin_wait()
        yield
        self.end_wait()

    def begin_wait(self, *_: Any) -> None:
        """Takes off what happens until `end_wait`."""
        if self._is_running:
            self._wait_began = self._now()

    def end_wait(self, *_: Any) -> None:
        began, self._wait_began = self._wait_began, None
        if began is not None:
            self._add(began, -1)

    def leave_out_gathers(self, module: nn.Module) -> None:
        """Takes off what the hooks do that are before a module's forward by now, such as FSDP2's waits."""
        module.register_forward_pre_hook(self.begin_wait, prepend=True)
        module.register_forward_pre_hook(self.end_wait)

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _add(self, began: float | torch.cuda.Event, sign: int) -> None:
        ended = self._now()
        if isinstance(began, float) and isinstance(ended, float):
            self._seconds += sign * (ended - began)
        elif isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            self._spans.append((began, ended, sign))

    def seconds(self) -> float:
        """Seconds since `restart`; waits for a GPU to get there."""
        return self.reading()()

    def reading(self) -> Callable[[], float]:
        """`seconds` of what has been counted by now, to be read once the next step has begun, and from any
        thread that has the GPU."""
        counted, spans = self._seconds, tuple(self._spans)
        return lambda: counted + _seconds_of(spans)


_Span = tuple[torch.cuda.Event, torch.cuda.Event, int]
"""From, to, and whether it counts (1) or is taken off (-1)."""


def _seconds_of(spans: Sequence[_Span]) -> float:
    if spans:
        spans[-1][1].synchronize()
    milliseconds: float = sum(sign * began.elapsed_time(ended) for began, ended, sign in spans)
    return milliseconds / 1000
