"""What a process holds of its host's memory, and files that come from the disk."""

from __future__ import annotations

import os
from pathlib import Path


def reset_peak() -> int | None:
    """The bytes that are resident now; the peak is counted from here. None where the system does not say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _read_status("VmRSS")


def read_peak() -> int | None:
    """The most bytes that were resident at a time."""
    return _read_status("VmHWM")


def _read_status(key: str) -> int | None:
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def forget_files(folder: Path) -> None:
    """Makes sure that a folder's files come from the disk, not from memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # What is not on the disk stays in memory.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
