"""SIGTERM and Ctrl-C end a run at a step boundary, the same one on every rank.

Python runs a signal handler only between two of its own instructions, not while a thread waits in
Gloo. But the interpreter writes the signal's number into a file descriptor at once; a thread that
reads there knows of the signal whatever the main thread waits for.

torchrun passes SIGTERM and Ctrl-C on to its processes and kills those that are still there 30 s
later, so a step must be shorter than that to be finished.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO_S = 2.0
"""A launcher (torchrun under Slurm, say) passes on a signal that this process gets by itself too."""


class SignalWatch:
    """Notes the first SIGINT or SIGTERM; a later one ends the process at once, with 128 + its number.

    Made in the main thread; `close` gives the handlers back.
    """

    def __init__(self) -> None:
        self.received = 0
        """The number of the first signal; 0 before there is one."""
        self._received_at = 0.0
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _take_note) for number in _SIGNALS}
        threading.Thread(target=self._read, name="zorselike-signals", daemon=True).start()

    def close(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._writer.close()  # Ends the thread.

    def _read(self) -> None:
        # Other signals with handlers (a data worker's end, say) arrive here too.
        while content := self._reader.recv(64):
            for number in content:
                if number in _SIGNALS:
                    self._note(number)
        self._reader.close()

    def _note(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.received and time.monotonic() - self._received_at < _ECHO_S:
            return
        if self.received:
            print(f"zorselike: {name} again, ending at once", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self._received_at = time.monotonic()
        self.received = number
        print(f"zorselike: {name}, ending after this step (once more: at once)", file=sys.stderr, flush=True)


class StopVote:
    """Agrees at every step on whether to stop, beside the step and so for free."""

    def __init__(self, watch: SignalWatch, group: dist.ProcessGroup) -> None:
        """`group`: a Gloo group of all ranks, not used by anything else during a step."""
        self._watch = watch
        self._group = group
        self._signal = torch.zeros((), dtype=torch.int64)
        self._work: dist.Work | None = None

    def open(self) -> None:
        """At a step's beginning: says what this rank has received so far."""
        self._signal.fill_(self._watch.received)
        self._work = dist.all_reduce(self._signal, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def close(self) -> int:
        """At its end: the signal for which all ranks stop now, or 0."""
        assert self._work is not None, "open comes before close"
        self._work.wait()
        self._work = None
        return int(self._signal)


def _take_note(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the number to be written; the thread does the rest."""
