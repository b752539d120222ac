"""SIGTERM, Ctrl-C and SIGUSR1 end a run at a step boundary, the same one on every rank. (Slurm sends SIGUSR1
before a time limit, if told to by `--signal=USR1@300`.)

Python runs a signal handler only between two instructions, not while the main thread waits in Gloo. But the
interpreter writes the signal's number into a file descriptor at once, so a thread that reads it learns of the
signal in any case.

torchrun forwards SIGTERM and Ctrl-C to its processes and kills those that are still running 30 s later, so a
step must be shorter than that to be finished. Whatever they return, it then prints a traceback of its own and
exits with code 1; all that a run can do is to say so before.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

from zorselike.runtime.processes.launcher import is_first_of_node

WHAT_TORCHRUN_PRINTS = (
    "the run has ended in order: what torchrun prints below, a traceback with SignalException or "
    "ChildFailedError, is how it reports a signal"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ECHO_S = 2.0
"""Seconds within which a repeated signal is an echo: launchers may forward one that this process also got."""


class SignalWatch:
    """Records the first SIGINT or SIGTERM; a second one ends the process at once, with 128 + its number.

    To be constructed in the main thread; `close` restores the previous handlers.
    """

    def __init__(self, on_first: Callable[[int], str] | None = None) -> None:
        """`on_first`: called with the first signal's number, in a thread; says what is done about it, for
        this process alone."""
        self.received = 0
        """Number of the first signal, or 0."""
        self._on_first = on_first
        self._received_at = 0.0
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _ignore) for number in _SIGNALS}
        threading.Thread(target=self._read, name="zorselike-signals", daemon=True).start()

    def close(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._writer.close()  # Ends the thread.

    def _read(self) -> None:
        # Other signals with handlers (such as a data worker's end) arrive here too.
        while content := self._reader.recv(64):
            for number in content:
                if number in _SIGNALS:
                    self._record(number)
        self._reader.close()

    def _record(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.received and time.monotonic() - self._received_at < _ECHO_S:
            return
        if self.received:
            print(f"zorselike: {name} again, stopping now", file=sys.stderr, flush=True)
            os._exit(128 + number)
        if self._on_first is not None:
            print(f"zorselike: {name}, {self._on_first(number)}", file=sys.stderr, flush=True)
        elif is_first_of_node():  # A launcher tells all of them.
            text = f"zorselike: {name}, stopping after this step (again: stop now)"
            print(text, file=sys.stderr, flush=True)
        self._received_at = time.monotonic()
        self.received = number

    @property
    def age_s(self) -> float:
        """Seconds since the first signal; 0 where there was none."""
        return time.monotonic() - self._received_at if self.received else 0.0


class StopVote:
    """Agreement of all ranks on whether to stop, beside each step and so without cost."""

    def __init__(
        self,
        watch: SignalWatch,
        group: dist.ProcessGroup,
        operation: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX,
    ) -> None:
        """`group`: a Gloo group of all ranks that nothing else uses during a step; `operation`: makes one of
        what all ranks have received, 0 being nothing."""
        self._watch = watch
        self._group = group
        self._operation = operation
        self._signal = torch.zeros((), dtype=torch.int64, device="cpu")
        self._work: dist.Work | None = None

    def open(self) -> None:
        """At a step's beginning: contributes the signal that this rank has received so far."""
        self._signal.fill_(self._watch.received)
        self._work = dist.all_reduce(self._signal, self._operation, group=self._group, async_op=True)

    def close(self) -> int:
        """At a step's end: the signal for which all ranks stop now, or 0."""
        assert self._work is not None, "open comes before close"
        self._work.wait()
        self._work = None
        return int(self._signal)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Without a Python handler the interpreter would not write the number; the thread does the rest."""
