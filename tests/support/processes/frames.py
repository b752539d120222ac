"""Python's frames without the calls of the system that deep ones may cost.

CPython, since 3.11, keeps frames in chunks of 16 KiB, and gives a chunk back when the first frame in it
returns: a loop whose calls begin a chunk maps and unmaps memory each time, which takes hundreds of times as
long as the call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SLOTS = 100_000
"""The rest of the chunk that a frame of so many begins holds some thousand small ones."""


def _call(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return fn(*args, **kwargs)


in_one_chunk = FunctionType(_call.__code__.replace(co_stacksize=_SLOTS), {}, "in_one_chunk")
"""Calls a function whose own calls begin no chunk; `in_one_chunk(fn, *args, **kwargs)`."""
