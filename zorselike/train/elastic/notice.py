"""SIGTERM in an elastic run: who alone gets it leaves, and if all do, the run is saved and ends."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch.distributed as dist

from zorselike.train.elastic.pipeline import ProgramPipeline
from zorselike.train.stop import SignalWatch, StopVote

_TOGETHER_S = 1.0
"""How long a process that was told to end waits for the others to be told so, too."""
_SPARE_LEAVES = "this spare leaves"


class Notice:
    """The signals of this process. To be made in the main thread, before the pipeline."""

    def __init__(self, *, notice_s: float) -> None:
        """`notice_s`: after so many seconds this process ends, wherever it is; 0: it does not."""
        self._notice_s = notice_s
        self.pipe: ProgramPipeline | None = None
        """Once it is there."""
        self.watch = SignalWatch(self._begin)
        self._has_left = False

    def _begin(self, number: int) -> str:
        """In a thread, at the first signal."""
        pipe = self.pipe
        if pipe is None or not pipe.has_part:
            if pipe is not None and pipe.is_spare:
                what, code = _SPARE_LEAVES, 0
            else:
                what, code = "ended before this process was given a part in its job", 128 + number
            print(f"zorselike: {what}", file=sys.stderr, flush=True)
            os._exit(code)
        if self._notice_s:
            timer = threading.Timer(self._notice_s, self._end, (number,))
            timer.daemon = True
            timer.start()
        if pipe.rank is None:
            self.leave()
            return _SPARE_LEAVES
        return "leaves at a step boundary; with all others, where all are told so (again: end now)"

    def _end(self, number: int) -> None:
        text = f"zorselike: [elastic] notice_s = {self._notice_s:g} are over; ends, and the others go on"
        print(text, file=sys.stderr, flush=True)
        os._exit(128 + number)

    def leave(self) -> None:
        """Has this process leave at a step boundary."""
        if not self._has_left and self.pipe is not None:
            self._has_left = True
            self.pipe.leave()

    def close(self) -> None:
        """Restores the previous handlers."""
        self.watch.close()


class EndVote(StopVote):
    """Whether all ranks were told to end, agreed beside each step and so without cost."""

    def __init__(self, watch: SignalWatch, group: dist.ProcessGroup) -> None:
        super().__init__(watch, group, dist.ReduceOp.MIN)
        self._age_s = 0.0
        self.is_alone = False
        """Whether this process was told so long ago that the others would have been told by then, too."""

    def open(self) -> None:
        """At a step's beginning."""
        self._age_s = self._watch.age_s
        super().open()

    def close(self) -> int:
        """At its end: a signal, where all had received one by its beginning, or 0."""
        number = super().close()
        self.is_alone = not number and self._age_s > _TOGETHER_S
        return number


def name_signal(number: int) -> str:
    return signal.Signals(number).name
