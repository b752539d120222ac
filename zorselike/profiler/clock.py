"""How long a device works: CUDA events on a GPU, the wall clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Mark = float | torch.cuda.Event


class Clock:
    """Marks on a device's own time line, for its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device

    def mark(self) -> Mark:
        """Now, as the device sees it: after all that it was given."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Between two marks; waits for the device to pass the second."""
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float) and isinstance(end, float)
            return end - begin
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def time(self, work: Callable[[], object], *, repeats: int, warmups: int = 1) -> float:
        """Median seconds of `work`, after it ran `warmups` times unmeasured."""
        for _ in range(warmups):
            work()
        self.wait()
        marks = []
        for _ in range(repeats):
            begin = self.mark()
            work()
            marks.append((begin, self.mark()))
        return median([self.seconds(begin, end) for begin, end in marks])


def median(seconds: Sequence[float]) -> float:
    """The middle one: what a moment of other work on the machine does not move."""
    return statistics.median(seconds)
