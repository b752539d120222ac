"""What is made of data files once and kept in `<dump_folder>/dataset_cache`."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zorselike.errors import ConfigError


def name_of(files: Sequence[Path], made_by: str) -> str:
    """A name that changes with the files (name, size, time) and with `made_by`."""
    digest = hashlib.sha256(made_by.encode())
    for file in files:
        status = file.stat()
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def make_once(target: Path, write: Callable[[Path], None]) -> Path:
    """`target`, a file or a folder, which the first process on the machine writes; there whole or not at all.

    `write` is given another path to write to.
    """
    with writing(target.parent):
        return _make_once(target, write)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Inside, what the system refuses is a `ConfigError` that names the key that says where, or another file
    that is read meanwhile."""
    try:
        yield
    except OSError as error:
        named = folder if error.filename is None else Path(error.filename)
        if not (folder.is_relative_to(named) or named.is_relative_to(folder)):
            raise ConfigError(f"{named}: {error.strerror}") from error
        raise ConfigError(f"[job] dump_folder: nothing can be written into {folder}: {error}") from error


def _make_once(target: Path, write: Callable[[Path], None]) -> Path:
    if target.exists():  # Where nothing can be written any more, too.
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            # Machines may share a folder without sharing its locks.
            partial = target.parent / f"{target.name}.{os.uname().nodename}"
            _remove(partial)  # Of a process that was killed.
            try:
                write(partial)
                partial.replace(target)
            except OSError:
                if not (partial.exists() and target.exists()):
                    raise
                # Another machine wrote the same folder, and a folder with content is not replaced.
            finally:
                _remove(partial)
    return target


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
