"""What the kernel knows of a process that is not heard.

One call into C that keeps Python's lock silences a healthy process, since its heartbeats need that lock:
FSDP's allocations do, and last as long as the GPU computes where the allocator has to give memory back
before. Kernels need no lock. This node's says whether a process here is stopped; another node's acknowledges
what was sent to its process, as long as neither the node nor the network is lost.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import termios
from pathlib import Path

HELD_S = 60.0
"""How long one call may keep Python's lock in a process that runs, or whose node is there."""

_PROCESSES = Path("/proc")
_STOPPED = frozenset("TtZXx")
"""States of `/proc/PID/stat`: stopped, traced, a zombie, dead."""


def name_process() -> str:
    """This process as `find_process` knows it, on whatever node; empty where the kernel does not say.

    Processes in two networks count as on two nodes, though of one machine: one that runs may be out of reach.
    """
    try:
        boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
        numbers, network = ((_PROCESSES / "self/ns" / kind).readlink() for kind in ("pid", "net"))
        return f"{boot} {numbers} {network} {os.getpid()}"
    except OSError:
        return ""


def find_process(name: str) -> int | None:
    """The number of a process by its name; None if it is not among those that this process can see."""
    place, _, number = name.rpartition(" ")
    return int(number) if place and place == name_process().rpartition(" ")[0] else None


def is_stopped(process: int) -> bool:
    """Whether a process that was there does not run any more."""
    try:
        state = (_PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in _STOPPED


def has_arrived(connection: socket.socket) -> bool:
    """Whether the other side's kernel has acknowledged all that was sent; False where ours does not say."""
    waiting = array.array("i", [0])
    try:
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, waiting)
    except OSError:
        return False
    return waiting[0] == 0
