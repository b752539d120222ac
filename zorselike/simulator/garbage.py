"""Python's garbage collector, kept from looking at large tables again and again while they grow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """No collections inside: lists of actions, tables of tasks and what a search remembers of them hold no
    cycles, so there is nothing to find in them, and looking takes a third to a half of the time that it takes
    to make them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
