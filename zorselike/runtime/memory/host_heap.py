"""What a process frees, and what its operating system gets back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of `mallopt` in `malloc.h`."""
_SMALL_BYTES = 2**20
_LARGE_BYTES = 32 * 2**20
"""Where glibc's own rule ends (`DEFAULT_MMAP_THRESHOLD_MAX`) in a process that has freed large blocks."""


@contextmanager
def giving_back() -> Iterator[None]:
    """Inside, what tensors of 1 MiB and more have held goes back to the system at once, as it does not while
    smaller blocks beside it live: a model that is built layer by layer would leave its own size in holes.
    Not so in steps, which need the same memory again. Without glibc it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mallopt(_M_MMAP_THRESHOLD, _SMALL_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES)
