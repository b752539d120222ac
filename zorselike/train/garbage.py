"""Python's garbage collection at chosen steps, so that no rank keeps the others waiting alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collect_garbage_every(steps: int) -> Iterator[Callable[[], None]]:
    """What to call after each step; collects after every `steps` of them, and Python itself never.
    With 0, Python collects when it likes."""
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
