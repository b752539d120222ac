"""How much more host memory this process can have: the machine's, a control group's, or what a person says.

A virtual machine may get its memory only as it uses it, and says that it has less. There the environment
variable `ZORSELIKE_HOST_MEMORY` (such as `180GiB`) says what all processes of a node can have together; what
is in use is taken off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zorselike.errors import ConfigError, FileError
from zorselike.text.units import read_memory
from zorselike.text.wording import show_bytes

HOST_MEMORY_VARIABLE = "ZORSELIKE_HOST_MEMORY"

ROOT = Path("/")
"""Root of `/proc` and `/sys`; replaced in tests."""


@dataclass(frozen=True)
class HostRoom:
    """Host memory that is left for buffers, and what limits it."""

    num_bytes: int
    limit: str

    def __str__(self) -> str:
        hint = "" if HOST_MEMORY_VARIABLE in self.limit else f"; {HOST_MEMORY_VARIABLE}=SIZE if there is more"
        return f"{show_bytes(self.num_bytes, 2)} ({self.limit}{hint})"


@dataclass(frozen=True)
class _Hierarchy:
    """Names of one version of Linux's control groups."""

    folder: str
    limit: str
    used: str
    cached: str
    """Entry of `memory.stat`: file cache that the kernel can drop."""


_V2 = _Hierarchy("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = _Hierarchy(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)


def find_host_room() -> HostRoom:
    """Host memory that is free now on this machine, or within this process's control groups. Raises
    `ConfigError` where `ZORSELIKE_HOST_MEMORY` is no size."""
    said = _said_bytes()
    if said is not None:
        return HostRoom(max(0, said - _used_bytes()), f"{HOST_MEMORY_VARIABLE} less what is in use")
    rooms = [HostRoom(_available_bytes(), "available memory")]
    for hierarchy, group in _control_groups():
        for limit, place in _limits(hierarchy, group):
            used = _number(place / hierarchy.used)
            if used is not None:
                held = max(0, used - (_entry(place / "memory.stat", hierarchy.cached) or 0))
                rooms.append(HostRoom(max(0, limit - held), "memory limit of the container or job"))
    return min(rooms, key=lambda room: room.num_bytes)


def find_host_memory() -> int:
    """Host memory of this machine in all, or the limit of this process's control groups; 0 where nothing
    says."""
    said = _said_bytes()
    if said is not None:
        return said
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    limits = (limit for hierarchy, group in _control_groups() for limit, _ in _limits(hierarchy, group))
    return min((total, *limits))


def _said_bytes() -> int | None:
    text = os.environ.get(HOST_MEMORY_VARIABLE)
    try:
        return read_memory(text, HOST_MEMORY_VARIABLE) if text else None
    except FileError as error:
        raise ConfigError(str(error)) from None


def _used_bytes() -> int:
    total, available = (_entry(ROOT / "proc/meminfo", name) for name in ("MemTotal:", "MemAvailable:"))
    return 0 if total is None or available is None else (total - available) * 1024


def _available_bytes() -> int:
    kib = _entry(ROOT / "proc/meminfo", "MemAvailable:")
    return find_host_memory() if kib is None else kib * 1024


def _control_groups() -> Iterator[tuple[_Hierarchy, str]]:
    """The control group of this process in each hierarchy that limits memory."""
    for line in _lines(ROOT / "proc/self/cgroup"):
        number, controllers, group = line.split(":", 2)
        if number == "0" and not controllers:
            yield _V2, group
        elif "memory" in controllers.split(","):
            yield _V1, group


def _limits(hierarchy: _Hierarchy, group: str) -> Iterator[tuple[int, Path]]:
    """Limits in bytes of a control group and all above it, and their folders."""
    top = ROOT / hierarchy.folder
    # Inside a container the path may be that of the host; the container's own group is then the top.
    folder = top / group.lstrip("/")
    for place in (folder, *folder.parents):
        limit = _number(place / hierarchy.limit)
        if limit is not None:
            yield limit, place
        if place == top:
            return


def _entry(path: Path, name: str) -> int | None:
    """The number after a name in a file of such lines."""
    entries = (line.split() for line in _lines(path))
    return next((int(words[1]) for words in entries if words[:1] == [name]), None)


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no file, or no limit."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
