"""How fast bytes go between a device and its host's memory: each way alone, and both at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from zorselike.cost.profile import HostLinkRates, Source
from zorselike.profiler.clock import Clock

NUM_BYTES = {"cuda": 2**26, "cpu": 2**24}


def measure_host_link(device: torch.device, *, type: str, repeats: int, source: Source) -> HostLinkRates:
    """Of copies between pinned host memory and the device; on a CPU rank, of copies inside its memory.

    `type`: the device's name in the profile.
    """
    on_gpu, num_bytes = device.type == "cuda", NUM_BYTES[device.type]
    host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu, device="cpu") for _ in range(2)]
    there = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    to_device = _copy(there[0], host[0])
    to_host = _copy(host[1], there[1])
    clock = Clock(device)
    both = _on_streams(device, to_device, to_host) if on_gpu else _in_threads(to_device, to_host)
    return HostLinkRates(
        device=type,
        to_device=num_bytes / clock.time(to_device, repeats=repeats),
        to_host=num_bytes / clock.time(to_host, repeats=repeats),
        both=2 * num_bytes / clock.time(both, repeats=repeats),
        source=source,
    )


def _copy(target: Tensor, source: Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _on_streams(device: torch.device, *copies: Callable[[], object]) -> Callable[[], object]:
    """Makes the copies at once, each on a stream of its own."""
    streams = [torch.cuda.Stream(device) for _ in copies]  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream(device)

    def run() -> None:
        for stream, copy in zip(streams, copies, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                copy()
        for stream in streams:
            current.wait_stream(stream)

    return run


def _in_threads(*copies: Callable[[], object]) -> Callable[[], object]:
    """Makes the copies at once, each in a thread of its own."""

    def run() -> None:
        threads = [threading.Thread(target=copy) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run
