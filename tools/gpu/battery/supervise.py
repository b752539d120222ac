"""Runs a part in a process of its own, and ends it at its limit once all threads have told where they are.

Imports no torch: whatever breaks, breaks in the part's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from .part import Part, Record, Settings, SkipPart

STACKS_S = 1.5
"""How long processes may take to write their stacks."""
_POLL_S = 0.02
_LOG_CHARACTERS, _STACK_CHARACTERS = 12_000, 100_000
"""At most, of the end; several ranks with many threads each have long stacks."""
_EMPTY: dict[str, Any] = {"lines": [], "results": {}, "checks": [], "figures": []}


def run_part(
    part: Part, settings: Settings, limit_s: float, *, told: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """What came of a part, as JSON has it. `told` hears about once a second what there is until then."""
    found_path, log_path = (settings.work / f"part-{part.name}.{kind}" for kind in ("json", "log"))
    found_path.unlink(missing_ok=True)
    log_path.write_bytes(b"")
    begin_s = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _live(part, settings, limit_s, found_path, log_path)
    code: int | None = None
    stack, log_ends, next_s = "", None, begin_s + 1.0
    while code is None:
        pid, state = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(state)
        elif (now_s := time.monotonic()) - begin_s > limit_s:
            log_ends = log_path.stat().st_size
            stack = _end(child, log_path)
            _, state = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(state)
        else:
            if now_s > next_s:
                told(_describe(part, limit_s, begin_s, _read(found_path)))
                next_s = now_s + 1.0
            time.sleep(_POLL_S)
    _kill(child)  # What it started and left behind.
    found = _read(found_path)
    if stack:
        found |= {"status": "timed out", "reason": f"not over after {limit_s:.0f} s", "stack": stack}
    elif "status" not in found:
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        found |= {"status": "failed", "reason": f"its process {how}"}
    if found["status"] in ("failed", "timed out"):
        found["log"] = _read_log(log_path, stop=log_ends)[-_LOG_CHARACTERS:]
    return _describe(part, limit_s, begin_s, found)


def _describe(part: Part, limit_s: float, begin_s: float, found: dict[str, Any]) -> dict[str, Any]:
    seconds = round(time.monotonic() - begin_s, 2)
    state = {"status": "running", "reason": "", "stack": "", "log": ""}
    return {"name": part.name, "what": part.what, "limit_s": round(limit_s, 1), "seconds": seconds} | (
        state | found
    )


def describe_skipped(part: Part, reason: str) -> dict[str, Any]:
    """A part that was not started."""
    found = dict(_EMPTY) | {"status": "skipped", "reason": reason}
    return _describe(part, part.limit_s, time.monotonic(), found)


def _read(path: Path) -> dict[str, Any]:
    return (
        json.loads(path.read_text()) if path.exists() else {key: type(own)() for key, own in _EMPTY.items()}
    )


def _read_log(path: Path, start: int = 0, stop: int | None = None) -> str:
    return path.read_bytes()[start:stop].decode(errors="replace")


# -- the part's process ---------------------------------------------------------------------


def _live(part: Part, settings: Settings, limit_s: float, found_path: Path, log_path: Path) -> None:
    """The whole life of the part's process."""
    try:
        os.setpgid(0, 0)
        _die_with_parent()
        _redirect(log_path)
        os.environ.update(settings.environment)
        record = Record(found_path, part, settings, limit_s)
        try:
            find_function(part.run)(record)
            record.end()
        except SkipPart as skipped:
            record.end("skipped", str(skipped))
        except BaseException as error:
            traceback.print_exc()
            lines = str(error).splitlines() or [""]
            record.end("failed", f"{type(error).__name__}: {lines[0]}")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def find_function(run: str | Callable[[Record], None]) -> Callable[[Record], None]:
    """What a part calls."""
    if callable(run):
        return run
    module, _, name = run.partition(":")
    function: Callable[[Record], None] = getattr(import_module(f"{__package__}.{module}"), name)
    return function


def _redirect(log_path: Path) -> None:
    target = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(target, fd)
        setattr(sys, name, io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), write_through=True))
    os.close(target)
    # Written without the interpreter's lock, so also where a call into CUDA holds it; inherited by forks.
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


# -- the limit ------------------------------------------------------------------------------


def _end(child: int, log_path: Path) -> str:
    """Makes all processes of a part write their stacks, and kills them; gives the stacks."""
    start = log_path.stat().st_size
    family = [child, *find_descendants(child)]
    for pid in family:
        if _catches(pid, signal.SIGUSR1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                time.sleep(STACKS_S / len(family))  # They write into one file: one after the other.
    time.sleep(STACKS_S)
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return _read_log(log_path, start)[-_STACK_CHARACTERS:] or "no process wrote where it was"


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def find_descendants(pid: int) -> list[int]:
    """All living processes that come from one (where there is `/proc`)."""
    parents = dict(_parents())
    found = [pid]
    for one in found:  # It grows.
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name before may hold anything, parentheses too.
            yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which it would else only die of; yes if nobody tells."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return True
