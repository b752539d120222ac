"""Finds and reads documents: `.txt` and `.jsonl` files, folders of them, the standard library."""

from __future__ import annotations

import codecs
import logging
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from zorselike.errors import ConfigError
from zorselike.runtime.processes.identity import find_identity
from zorselike.text.wording import list_few
from zorselike.train.data.examples import JSON_LINES, read_lines, text_of, value_of

logger = logging.getLogger("zorselike")

TEXT_SUFFIXES = (".txt", JSON_LINES)
TOKEN_SUFFIX = ".bin"

_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_OTHER_DATA = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".npy")
"""What a folder of data may hold and is not read, with `_PACKED`; in capitals too, which no suffix that is
read has."""

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_PIECE_BYTES = 16 * 2**20
"""Large files are read and tokenized in pieces of about this size, cut at line ends."""

_OF_THE_DISK = "lost+found"
"""A folder at the top of each ext disk, which root alone can read."""

_UNKNOWN = "\ufffd"
"""What stands for bytes that are no characters."""


class Piece(NamedTuple):
    """Consecutive text of one document."""

    text: str
    ends_document: bool


def list_files(dataset_path: str, *, section: str = "training", outputs: Path | None = None) -> list[Path]:
    """The text or token files that a section's `dataset_path` names; a folder's in sorted order, but for
    those in `outputs` inside it, which runs have written.

    Raises:
        ConfigError: there is no such file, none of a known kind, text beside token files, a folder in it
            that cannot be read, or it is `outputs` itself.
    """
    where = f"[{section}] dataset_path = {dataset_path}"
    try:
        return _list_files(Path(dataset_path).expanduser(), where, outputs)
    except OSError as error:
        raise ConfigError(f"{where}: {error.filename} cannot be read: {error.strerror}") from error


def _list_files(path: Path, where: str, outputs: Path | None) -> list[Path]:
    known = (*TEXT_SUFFIXES, TOKEN_SUFFIX)
    if path.is_file():
        if path.suffix not in known:
            raise ConfigError(
                f"{where}: must be a {', '.join(known[:-1])} or {known[-1]} file, or a folder of them"
            )
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{where}: there is no such file or folder")
    if outputs is not None and outputs.resolve() == path.resolve():
        raise ConfigError(f"{where} is [job] dump_folder too, and what runs write is no data; name another")
    found = [file for file in _walk(path, outputs) if file.is_file()]
    files = sorted(file for file in found if file.suffix in known)
    left_out = list_few(sorted({kind for file in found if (kind := _kind_left_out(file, known))}))
    if not files:
        has = f"; {left_out} files in it are not read" if left_out else ""
        raise ConfigError(f"{where}: the folder contains no {', '.join(known[:-1])} or {known[-1]} file{has}")
    if left_out and find_identity().rank == 0:
        _say_left_out(f"{where}: {left_out} files in the folder are left out; read are {', '.join(known)}")
    if len({file.suffix == TOKEN_SUFFIX for file in files}) > 1:
        raise ConfigError(f"{where}: the folder contains text and {TOKEN_SUFFIX} token files; separate them")
    return files


def _kind_left_out(file: Path, known: tuple[str, ...]) -> str:
    """The suffix of what is data by its name and not read, else nothing."""
    suffix = file.suffix.lower()
    if suffix in _PACKED:
        return "".join(file.suffixes[-2:])
    return file.suffix if suffix in _OTHER_DATA or (suffix in known and file.suffix != suffix) else ""


@cache
def _say_left_out(text: str) -> None:
    """Once, however often a run looks for its data."""
    logger.warning("%s", text)


def _walk(path: Path, outputs: Path | None) -> Iterator[Path]:
    """All files below a folder but for those of `outputs`; raises `OSError` where one of its folders cannot
    be read."""

    def refuse(error: OSError) -> None:
        raise error

    left_out = None if outputs is None else outputs.resolve()
    for folder, inner, names in os.walk(path, onerror=refuse):
        inner[:] = [
            name for name in inner if name != _OF_THE_DISK and Path(folder, name).resolve() != left_out
        ]
        yield from (Path(folder, name) for name in names)


def list_standard_library() -> list[Path]:
    """The sources of Python's standard library in sorted order, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for folder in _library_folders(root) for file in folder.glob("*.py") if file.is_file()]
    if not files:
        raise ConfigError(f'dataset = "stdlib": no Python sources under {root}; give dataset_path instead')
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _library_folders(root: Path) -> Iterator[Path]:
    for name, inner, _ in os.walk(root):
        inner[:] = set(inner) - _NOT_LIBRARY  # Installed packages may be many thousand files.
        yield Path(name)


def read_pieces(file: Path) -> Iterator[Piece]:
    """The documents of a file: the lines of a `.jsonl`, else the whole file."""
    if file.suffix == JSON_LINES:
        yield from _read_json_lines(file)
        return
    with file.open("rb") as stream:
        if stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ConfigError(f"{file}: is UTF-16; save it as UTF-8")
    is_clean = True
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        while lines := stream.readlines(_PIECE_BYTES):
            text = "".join(lines)
            if is_clean and _UNKNOWN in text:
                is_clean = False
                logger.warning("%s: what is not UTF-8 is read as %s; save it as UTF-8", file, _UNKNOWN)
            yield Piece(text, ends_document=False)
    yield Piece("", ends_document=True)


def _read_json_lines(file: Path) -> Iterator[Piece]:
    for line in read_lines(file):
        yield Piece(text_of(line, "text", value_of(line, "text")), ends_document=True)
