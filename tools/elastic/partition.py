"""Two nodes in network namespaces of this machine, and one link between them to be cut (needs root)."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from .injection import LINK

HOSTS = ("10.77.91.1", "10.77.91.2")
_NAMES = tuple(f"elastic-{os.getpid()}-{i}" for i in range(2))


@contextmanager
def two_nodes() -> Iterator[tuple[str, ...]]:
    """Inside, the namespaces are there; gives their addresses. Raises `OSError` where that is not allowed."""
    try:
        for name in _NAMES:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", _NAMES[0], "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", _NAMES[1])
        for name, host in zip(_NAMES, HOSTS, strict=True):
            _ip("-n", name, "address", "add", f"{host}/24", "dev", LINK)
            _ip("-n", name, "link", "set", LINK, "up")
        yield HOSTS
    finally:
        for name in _NAMES:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def enter_namespace(node: int) -> None:
    """From here on this process is on that node."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{_NAMES[node]}") as file:  # noqa: PTH123
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from None
