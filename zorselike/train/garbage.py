"""Python's garbage collection at the same steps on all ranks, so that none delays the others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collect_garbage_every(steps: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each step; it collects at every `steps`-th call, and automatic
    collection is disabled. With 0, Python collects automatically."""
    num_steps = 0

    def count() -> None:
        nonlocal num_steps
        num_steps += 1
        if steps and num_steps % steps == 0:
            gc.collect()

    was_enabled = gc.isenabled()
    if steps:
        gc.disable()
    try:
        yield count
    finally:
        if was_enabled:
            gc.enable()
