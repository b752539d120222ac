"""Gloo's connections to other processes: ending them frees a thread that waits in Gloo, which nothing else
does."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import stat
import threading
import weakref
from contextlib import suppress
from pathlib import Path

_FILES = Path("/dev/fd")
_AGAIN_S = 0.05
_FILES_WANTED = 1 << 16


class Connections:
    """Those that Gloo has made since this object was, and those to some ports of torch's stores.

    Never listeners, and nothing else that this process has: Gloo's alone are not closed by `exec` (measured
    with torch 2.13; Python's sockets, and so control links and the alarm's, and torch's stores all are).

    The other sides do not hear that they have ended before `let_go`, or before this object goes, though Gloo
    closes its own. They may be just about to send, and Gloo forgets what it cannot write: whoever waits for
    the end of that waits for good (torch 2.13).
    """

    def __init__(self) -> None:
        self._store_ports: set[int] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._keeper: threading.Thread | None = None
        self._before = frozenset(_list_sockets().values())
        self._held: dict[tuple[int, int], socket.socket] = {}
        """Duplicates of what was ended."""
        weakref.finalize(self, _close, self._held)

    def add_store(self, port: int) -> None:
        """A store there may keep this process waiting for an answer."""
        self._store_ports.add(port)

    def end(self) -> None:
        """What is made from now on is another's: nothing is shut any more."""
        with self._lock:
            self._ended.set()

    def shut(self) -> int:
        """Ends all of them; returns how many. From any thread."""
        with self._lock:
            return 0 if self._ended.is_set() else self._shut()

    @property
    def num_held(self) -> int:
        """Ended ones of which the other sides have not heard yet."""
        return len(self._held)

    def let_go(self) -> None:
        """All others have left as well, or end this way."""
        with self._lock:
            _close(self._held)

    def keep_shut(self) -> None:
        """Ends all of them, and what follows, until `end`: a thread that is making groups makes more."""
        self.shut()
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="zorselike-connections", daemon=True)
            self._keeper.start()

    def _keep(self) -> None:
        while not self._ended.wait(_AGAIN_S):
            self.shut()

    def _shut(self) -> int:
        count = 0
        for number, identity in _list_sockets().items():
            if identity in self._before or identity in self._held:
                continue
            with suppress(OSError):
                # A duplicate: the owner may close its own at any time, and another get that number.
                is_ours = bool(fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
                connection = socket.socket(fileno=os.dup(number))
                try:
                    if _identify(connection.fileno()) == identity and self._is_wanted(connection, is_ours):
                        end(connection)
                        self._held[identity] = connection
                        count += 1
                finally:
                    if self._held.get(identity) is not connection:
                        connection.close()
        return count

    def _is_wanted(self, connection: socket.socket, is_ours: bool) -> bool:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        port = connection.getpeername()[1]  # An error of a listener.
        return not is_ours or port in self._store_ports


def allow_many_files() -> None:
    """Raises this process's limit on open files as far as it may: in each group of all ranks Gloo has a
    connection to every one, and of a hundred ranks these are more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # Some kernels allow less than they say.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def end(connection: socket.socket) -> None:
    """Nothing more is received, which Gloo takes for the other side's end, and so do torch's stores.

    It may still send: where it is just told that the other side is ready, and then cannot write, it forgets
    what it was to send, and whoever waits for the end of that waits for good (torch 2.13).
    """
    connection.shutdown(socket.SHUT_RD)


def _close(held: dict[tuple[int, int], socket.socket]) -> None:
    while held:
        held.popitem()[1].close()


def _list_sockets() -> dict[int, tuple[int, int]]:
    """Open sockets of this process by their number, and what no later one will be."""
    found = {}
    for entry in _FILES.iterdir():
        with suppress(OSError):
            identity = _identify(int(entry.name))
            if identity is not None:
                found[int(entry.name)] = identity
    return found


def _identify(number: int) -> tuple[int, int] | None:
    status = os.fstat(number)
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None
