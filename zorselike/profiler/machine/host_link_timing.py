"""How fast bytes go between a device and its host's memory: each way alone, and both at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from zorselike.cost.profile import HostLinkRates, Source
from zorselike.profiler.clock import Clock, median

NUM_BYTES = {"cuda": 2**26, "cpu": 2**24}


def measure_host_link(device: torch.device, *, type: str, repeats: int, source: Source) -> HostLinkRates:
    """Of copies between pinned host memory and the device; on a CPU rank, of copies inside its memory.

    `type`: the device's name in the profile.
    """
    on_gpu, num_bytes = device.type == "cuda", NUM_BYTES[device.type]
    host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    there = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    to_device = _copy(there[0], host[0])
    to_host = _copy(host[1], there[1])
    clock = Clock(device)
    both = _time_on_streams if on_gpu else _time_in_threads
    return HostLinkRates(
        device=type,
        to_device=num_bytes / clock.time(to_device, repeats=repeats),
        to_host=num_bytes / clock.time(to_host, repeats=repeats),
        both=2 * num_bytes / both(device, to_device, to_host, repeats),
        source=source,
    )


def _copy(target: Tensor, source: Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _time_on_streams(
    device: torch.device, first: Callable[[], object], second: Callable[[], object], repeats: int
) -> float:
    """Seconds until both copies are over, each on a stream of its own."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream(device)

    def run() -> None:
        for stream, copy in zip(streams, (first, second), strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                copy()
        for stream in streams:
            current.wait_stream(stream)

    return Clock(device).time(run, repeats=repeats)


def _time_in_threads(
    device: torch.device, first: Callable[[], object], second: Callable[[], object], repeats: int
) -> float:
    """Seconds until both copies are over, each in a thread of its own."""
    seconds = []
    for _ in range(1 + repeats):
        threads = [threading.Thread(target=copy) for copy in (first, second)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])
