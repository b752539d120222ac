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
        return statistics.median(self.seconds(begin, end) for begin, end in marks)


def trimmed_mean(seconds: Sequence[float]) -> float:
    """The mean without the largest, one in forty: of what is fast and slow by turns, what a sum of many comes
    to, but for a moment of other work on the machine."""
    kept = sorted(seconds)[: max(1, len(seconds) * 39 // 40)]
    return statistics.fmean(kept)


def make_rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """Times of rising sizes without their noise: where more takes less time, all of them take their mean
    (isotonic regression, by pooling adjacent violators)."""
    pools: list[list[float]] = []
    for second in seconds:
        pools.append([second])
        while len(pools) > 1 and statistics.fmean(pools[-2]) >= statistics.fmean(pools[-1]):
            later = pools.pop()
            pools[-1] += later
    return tuple(statistics.fmean(pool) for pool in pools for _ in pool)
