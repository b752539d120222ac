"""Text files that people edit: whole or not at all, and with errors that say what to do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import uuid
from pathlib import Path

from zorselike.errors import FileError


def read_text(path: str | Path, noun: str) -> str:
    """The text of a file that holds a `noun` (`plan`, `cluster`); `FileError` if there is none."""
    try:
        # A byte-order mark is no error: some editors write one unasked.
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise FileError(f"there is no such file; check the path of the {noun}") from None
    except IsADirectoryError:
        raise FileError(f"is a directory; give the {noun} file in it") from None
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FileError(f"is not a text file (byte {error.start}); a {noun} is text in UTF-8") from None
    except ValueError as error:
        raise FileError(f"is no path: {error}") from None


def check_writable(path: str | Path) -> None:
    """Raises `FileError` where a file cannot be written, which is known before minutes of work: neither
    replaced, for which its folder must be writable, nor written into."""
    try:
        with contextlib.suppress(FileNotFoundError):
            Path(path).stat()
    except OSError as error:
        raise FileError(f"cannot be written: {error.strerror}; name another file") from None
    if not os.access(Path(path).resolve().parent, os.W_OK | os.X_OK) and not os.access(path, os.W_OK):
        raise FileError("cannot be written there; name another file")


def write_text(path: str | Path, text: str) -> None:
    """Writes a file so that whoever reads it sees the old one or the new one, whole; into a device or a pipe,
    such as `/dev/null`, its text is written, and into what this process prints to, such as `/dev/stdout`, its
    text is printed.

    Raises:
        FileError: It cannot be written.
    """
    given = Path(path)
    target = given.resolve()
    if target.is_dir():
        raise FileError("is a directory; give the name of a file in it")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        if _is_printed_to(given):  # Replaced, it would lack all that is printed.
            sys.stdout.write(text)
            return
        if given.exists() and not given.is_file():  # `resolve` makes no path of a pipe's name.
            given.write_text(text, encoding="utf-8", newline="\n")
            return
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):  # A read-only disk refuses even what is not there.
            temporary.unlink(missing_ok=True)
        raise FileError(f"cannot be written: {error.strerror}") from None


def _is_printed_to(path: Path) -> bool:
    """Whether it is what this process was given as standard output."""
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:  # There is no such file yet, or no output.
        return False


def hash_content(content: object) -> str:
    """Twelve hex digits of nested lists, tuples, dictionaries, strings and numbers."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def open_closed_streams() -> None:
    """What a process prints goes nowhere where it was started without standard output or error, as some that
    start jobs do; Python has None there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  To the end of the process.
