"""Writers that are killed, that fail, that lose power, or that are two."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from zorselike.checkpoint.lease import Lease
from zorselike.errors import CheckpointError

from .calls import count_calls, disturbed, fail_at, kill_at
from .subject import NEW, Share, Subject, Tally, copies_of, find_fault_after, make_base

_CODES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
_NUM_RIVALS = 6
_NUM_TURNS = 50


def kill(subject: Subject, scratch: Path, share: Share) -> Tally:
    """A writer is killed before, after and in the middle of each call that changes the disk."""
    tally = Tally("kills")
    copies = copies_of(make_base(subject, scratch / "base"), scratch)
    folder = next(copies)
    calls = count_calls(lambda: subject.save(folder, NEW))
    cases = [
        (number, name, how)
        for number, name in enumerate(calls)
        for how in ("before", "after", *(["torn"] if name == "write" else []))
    ]
    for number, name, how in share.of(cases):
        folder = next(copies)
        status = _fork(lambda: _save_disturbed(subject, folder, number, how))  # noqa: B023
        fault = None if status == -signal.SIGKILL else f"the writer ended with {status}"
        tally.add(f"killed {how} call {number} ({name})", fault or find_fault_after(subject, folder))
    return tally


def _save_disturbed(subject: Subject, folder: Path, number: int, how: str) -> None:
    with disturbed(kill_at(number, how)):
        subject.save(folder, NEW)


def _fork(work: Callable[[], object]) -> int:
    """Does something in a process of its own; returns its exit code, minus the signal that ended it."""
    return _wait(_start(work))


def _start(work: Callable[[], object]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fail(subject: Subject, scratch: Path, share: Share) -> Tally:
    """Each call that changes the disk fails, once or from then on."""
    tally = Tally("errors")
    copies = copies_of(make_base(subject, scratch / "base"), scratch)
    folder = next(copies)
    calls = count_calls(lambda: subject.save(folder, NEW))
    cases = [
        (number, name, code, stays)
        for number, name in enumerate(calls)
        for code in _CODES
        for stays in (False, True)
    ]
    for number, name, code, stays in share.of(cases):
        folder = next(copies)
        said = folder.parent / "said"
        status = _fork(lambda: said.write_text(_try_to_save(subject, folder, number, code, stays=stays)))  # noqa: B023
        fault = said.read_text() if status == 0 else f"the writer ended with {status}"
        what = f"{errno.errorcode[code]} {'from' if stays else 'at'} call {number} ({name})"
        tally.add(what, fault or find_fault_after(subject, folder))
    return tally


def _try_to_save(subject: Subject, folder: Path, number: int, code: int, *, stays: bool) -> str:
    """What is wrong with how it fails, which it need not."""
    num_open = _count_descriptors()
    fault = ""
    try:
        with disturbed(fail_at(number, code, stays=stays)):
            subject.save(folder, NEW)
    except OSError as error:
        if error.errno != code or error.filename is None:
            fault = f"{error!r} does not say what failed where"
    except Exception as error:
        fault = f"{error!r} in place of the system's error"
    return fault or ("a file stays open" if _count_descriptors() != num_open else "")


def _count_descriptors() -> int:
    path = Path("/proc/self/fd")
    return len(list(path.iterdir())) if path.exists() else 0


def _lease_and_die(folder: Path) -> None:
    Lease(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def rival(subject: Subject, scratch: Path, share: Share) -> Tally:
    """Several writers begin at once, over the lease of one that was killed: one of them has the folder."""
    tally = Tally("rivals")
    copies = copies_of(make_base(subject, scratch / "base"), scratch)
    for turn in share.of(range(_NUM_TURNS)):
        folder = next(copies)
        _fork(partial(_lease_and_die, folder))
        begin, go = os.pipe()
        pids = [_start(lambda: _contend(folder, begin, go)) for _ in range(_NUM_RIVALS)]  # noqa: B023
        os.close(go)
        os.close(begin)
        ends = {pid: os.waitpid(pid, os.WUNTRACED)[1] for pid in pids}
        winners = [pid for pid, status in ends.items() if os.WIFSTOPPED(status)]
        for pid in winners:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        fault = None
        if len(winners) != 1 or any(status for pid, status in ends.items() if pid not in winners):
            fault = f"{len(winners)} of {_NUM_RIVALS} have the folder"
        tally.add(f"rivals, turn {turn}", fault or find_fault_after(subject, folder, may_be_new=False))
    return tally


def _contend(folder: Path, begin: int, go: int) -> None:
    os.close(go)
    os.read(begin, 1)  # Until all have been started.
    try:
        Lease(folder).check()
    except CheckpointError as error:
        assert "this folder" in str(error), error
    else:
        os.kill(os.getpid(), signal.SIGSTOP)  # Holds it until all have tried.
