"""Only one job writes into a folder of checkpoints: it holds the folder's lease."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from zorselike.checkpoint.layout import LEASE
from zorselike.checkpoint.slices import make_folders, write_file
from zorselike.errors import CheckpointError

EXPIRES_S = 600.0
"""After so many seconds without renewal a holder on another machine is taken to be gone."""
RENEWS_S = 60.0
_LOCKED_S = 10.0
"""Who takes a lease is done with it long before."""


@dataclass(frozen=True)
class _Holder:
    """Who holds a lease. The token makes each lease another one."""

    token: str
    host: str
    machine: str
    """Tells apart machines of one name, and processes of containers that number theirs alike."""
    pid: int
    started: str
    """When the process began, in the system's count: numbers of processes come again."""
    since: str
    job: str = ""
    """Of a job whose leader may be another process tomorrow: that one is its heir."""


class Lease:
    """A folder's lease, held from its making until `release` or the process's end. A thread renews it."""

    def __init__(self, folder: Path, *, job: str = "") -> None:
        """Takes the lease; makes the folder if need be. That of a process of this machine that has ended
        is taken over, and so are another machine's that has not been renewed for `EXPIRES_S`, and that of
        the same `job`, whose processes agree on which of them saves.

        Raises:
            CheckpointError: Another one holds it; says who.
        """
        self.path = folder / LEASE
        self._holder = _Holder(
            uuid.uuid4().hex,
            socket.gethostname(),
            _identify_machine(),
            os.getpid(),
            _find_start(os.getpid()) or "",
            datetime.now(UTC).isoformat(timespec="seconds"),
            job,
        )
        self._take()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="checkpoint lease", daemon=True)
        self._thread.start()

    def keep(self) -> bool:
        """As `check`, but takes the lease again where it was deleted, with all of its folder perhaps; whether
        it was."""
        if was_deleted := not self.path.exists():
            self._take()
        else:
            self.check()
        return was_deleted

    def check(self) -> None:
        """Raises `CheckpointError` if the lease is no longer this one's: somebody deleted it or took it
        over, while this process stood still. To be called before every commit."""
        holder = _read(self.path)
        if holder is None or holder.token != self._holder.token:
            raise CheckpointError(
                f"{self.path}: this job no longer holds the lease of its folder; {_describe(holder)} does"
            )

    def release(self) -> None:
        """Gives the lease back, if it is still this one's. What cannot be deleted ends with this process."""
        self._ends.set()
        self._thread.join()
        with contextlib.suppress(CheckpointError, OSError):
            self.check()
            self.path.unlink()

    def _take(self) -> None:
        folder = self.path.parent
        make_folders(folder)
        written = folder / f"{LEASE}.{self._holder.token[:8]}"
        try:
            write_file(written, json.dumps(vars(self._holder)).encode())
            with _alone(folder):
                if not self._place(written):
                    self._take_over(written)
        finally:
            with contextlib.suppress(OSError):
                written.unlink()

    def _place(self, written: Path) -> bool:
        """Whether the lease was free and is this one's now. It appears with all that it says."""
        try:
            os.link(written, self.path)
        except FileExistsError:
            return False
        except OSError:  # A file system without links.
            if self.path.exists():
                return False
            written.rename(self.path)
        return True

    def _take_over(self, written: Path) -> None:
        holder = _read(self.path)
        is_heir = bool(holder and self._holder.job and holder.job == self._holder.job)
        if not is_heir and not _is_gone(holder, self.path, written):
            raise CheckpointError(
                f"{self.path}: {_describe(holder)} saves into this folder; give each job a folder of its "
                f"own, or delete {self.path} if that process is gone"
            )
        # Moved before it is deleted: another one may just have taken the lease over, whose it is then
        # (where `_alone` could not keep it out).
        moved = self.path.with_name(f"{written.name}.old")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(moved)
            if _read(moved) != holder:
                self._put_back(moved)
            moved.unlink(missing_ok=True)
        if not self._place(written):
            raise CheckpointError(f"{self.path}: another job has just taken this folder; give each its own")

    def _put_back(self, moved: Path) -> None:
        with contextlib.suppress(FileExistsError):
            os.link(moved, self.path)

    def _renew(self) -> None:
        while not self._ends.wait(RENEWS_S):
            with contextlib.suppress(OSError, CheckpointError):
                self.check()
                os.utime(self.path)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process takes the folder's lease meanwhile, where the file system can lock a folder: a lease
    that one rival has just taken must not be moved away by another that saw its predecessor's."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        _lock(opened)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)  # A process forked meanwhile would hold it longer.
        os.close(opened)


def _lock(opened: int) -> None:
    """Goes without the lock where the file system has none, or where a holder has been stopped."""
    gives_up = time.monotonic() + _LOCKED_S
    while time.monotonic() < gives_up:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return
        else:
            return


def _read(path: Path) -> _Holder | None:
    """Who holds a lease; None where there is none, or nothing that says so."""
    try:
        return _Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _is_gone(holder: _Holder | None, path: Path, now: Path) -> bool:
    """Whether a lease's holder has ended; `now` was written just now, by the file system's clock."""
    if holder and (holder.host, holder.machine) == (socket.gethostname(), _identify_machine()):
        return _find_start(holder.pid) != holder.started
    try:
        return now.stat().st_mtime - path.stat().st_mtime > EXPIRES_S
    except FileNotFoundError:
        return True


def _describe(holder: _Holder | None) -> str:
    return (
        "an unknown process"
        if holder is None
        else f"process {holder.pid} on {holder.host} (since {holder.since})"
    )


def _identify_machine() -> str:
    """This boot of this machine and this namespace of processes; empty where the system does not say."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    return ""


def _find_start(pid: int) -> str | None:
    """When a process began, empty where the system does not say; None if there is none of that number."""
    try:
        # After the name in brackets, which may hold anything; the 22nd value of proc_pid_stat(5).
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if values[0] in "ZX" else values[19]  # Ended, though its parent has not asked.
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""
