"""Calls that change the disk, counted and disturbed."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

NAMES = ("open", "write", "fsync", "close", "mkdir", "rename", "link", "unlink", "rmdir")
"""Of `os`. Calls of `open` that only read are not counted, nor is what closes them."""

Disturb = Callable[[int, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets the number of the call, counted from 0, its name, and what it would have done; returns what is
returned instead."""


@contextmanager
def disturbed(disturb: Disturb) -> Iterator[None]:
    """Inside, every call goes to `disturb`."""
    number = -1
    written: set[int] = set()

    def replace(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            if name == "open" and not (args[1] if len(args) > 1 else kwargs["flags"]) & os.O_CREAT:
                return original(*args, **kwargs)
            if name == "close" and args[0] not in written:
                return original(*args, **kwargs)
            number += 1
            if name == "close":
                written.discard(args[0])
            result = disturb(number, name, original, args, kwargs)
            if name == "open":
                written.add(result)
            return result

        return call

    with ExitStack() as replaced:
        for name in NAMES:
            replaced.enter_context(mock.patch.object(os, name, replace(name, getattr(os, name))))
        yield


def count_calls(work: Callable[[], object]) -> list[str]:
    """The names of the calls of some work, in order."""
    names = []

    def note(number: int, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        names.append(name)
        return original(*args, **kwargs)

    with disturbed(note):
        work()
    return names


def kill_at(wanted: int, how: str) -> Disturb:
    """Kills this process `before` or `after` one call, or after half of what it should write (`torn`)."""

    def disturb(number: int, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if number == wanted and how != "after":
            if how == "torn":
                original(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if number == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return disturb


def fail_at(wanted: int, code: int, *, stays: bool) -> Disturb:
    """Raises an error of the system at one call, or from then on too; a write fails in its middle. A full
    disk lets files be deleted and renamed."""
    spared = {"close", "unlink", "rmdir", "rename"} if code in (errno.ENOSPC, errno.EDQUOT) else {"close"}

    def disturb(number: int, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if number != wanted and not (stays and number > wanted and name not in spared):
            return original(*args, **kwargs)
        if name == "write" and number == wanted and len(args[1]) > 1:
            original(args[0], args[1][: len(args[1]) // 2])
        if name == "close":
            original(*args)  # The descriptor is gone, whatever it says.
        # Like the system: who gives a path is told it.
        raise OSError(code, os.strerror(code), None if isinstance(args[0], int) else str(args[0]))

    return disturb
