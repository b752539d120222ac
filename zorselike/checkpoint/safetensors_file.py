"""Safetensors files of somebody else's: what they hold, and any rows of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zorselike.checkpoint.layout import DTYPE_BYTES
from zorselike.checkpoint.slices import Slice, as_bytes
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import VALUE, Box

_PICKLES = frozenset((".bin", ".pt", ".pth"))
_MAX_HEADER_BYTES = 100 * 10**6
"""More is refused by the safetensors library too."""
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""All weights; which files `transformers` has dealt a model's tensors to."""


class SafetensorsFile:
    """One file: what its header says, which is checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offsets: dict[str, int] = {}
        """From the file's start."""
        self.slices: list[Slice] = []
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                    raise ValueError("the length of its header is wrong")
                self._read(json.loads(file.read(length)), 8 + length, size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: is no safetensors file, or damaged: {error}") from None

    def _read(self, header: Any, start: int, size: int) -> None:
        """Raises anything where the header is not what it must be."""
        ends = start
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
            shape, dtype = tuple(entry["shape"]), str(entry["dtype"])
            begin, end = entry["data_offsets"]
            if dtype not in DTYPE_BYTES:
                raise ValueError(f"{name} is of dtype {dtype}; there are {', '.join(DTYPE_BYTES)}")
            if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
                raise ValueError(f"{name} has a shape or place that is not of integers")
            one = Slice(Box.whole(name, VALUE, shape), dtype, shape)
            if start + begin != ends or begin + one.num_bytes != end:
                raise ValueError(f"{name} is not where its header says")
            self.slices.append(one)
            self.offsets[name] = ends
            ends += one.num_bytes
        if ends != size:
            raise ValueError(f"it has {size} bytes and not {ends}")

    def read_rows(self, one: Slice, start: int, stop: int, target: memoryview) -> None:
        """Reads the rows `[start, stop)` of a tensor of `slices`.

        Args:
            one: the tensor.
            start: the first row; a tensor without dimensions is one row.
            stop: behind the last.
            target: their bytes, C-contiguous.

        Raises:
            CheckpointError: The file is shorter than it was, or cannot be read.
        """
        row_bytes = one.num_bytes // max(1, one.shape[0] if one.shape else 1)
        view = as_bytes(target)
        if len(view) != (stop - start) * row_bytes:
            raise ValueError(
                f"{one.entry}: {len(view)} bytes for rows {start} to {stop} of {row_bytes} bytes"
            )
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offsets[one.box.name] + start * row_bytes)
                while view:
                    num_bytes = file.readinto(view)
                    if not num_bytes:
                        raise CheckpointError(f"{self.path}: {one.box.name}: the file is cut off")
                    view = view[num_bytes:]
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from None


def may_be(one: Slice, part: Box, whole: Box) -> bool:
    """Whether a file's tensor may be a part of a tensor: it has its shape, or has it without the first
    dimension if the part has one entry of that; and the part lies inside."""
    return part.shape in (one.shape, (1, *one.shape)) and (part == whole or whole.intersect(part) == part)


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Files for themselves, and of a folder those of its weights; raises `CheckpointError` for none."""
    return [file for path in paths for file in (_list_folder(path) if path.is_dir() else [path])]


def _list_folder(folder: Path) -> list[Path]:
    """`model.safetensors`, else those of the index, else all: the same weights may be there in another form
    too. In the order of `transformers`, which leaves an index behind where it writes one file later."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if any(name != Path(name).name for name in names):
                raise ValueError("it names files that are elsewhere")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index}: is no index of safetensors files: {error}") from None
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        why = f"; {pickles[0]} is a pickle, which is not read: save it as safetensors" if pickles else ""
        raise CheckpointError(f"{folder}: holds no safetensors files{why}")
    return found


def open_folder(folder: Path) -> list[SafetensorsFile]:
    """The files of a model's folder, or the one that is named.

    Raises:
        CheckpointError: There is none, or one is missing or damaged.
    """
    if not folder.exists():
        raise CheckpointError(f"{folder}: there is no such folder")
    return [SafetensorsFile(path) for path in list_files([folder])]


def fingerprint_weights(folder: Path) -> str:
    """SHA-256 over the headers of a folder's files and samples of their bytes, whatever the files are called:
    256 KiB of each are read.

    Raises `CheckpointError` where there is no such file, or one is damaged, and `OSError` where it cannot be
    read.
    """
    digest = hashlib.sha256()
    for file in sorted(open_folder(folder), key=lambda file: min(file.offsets, default="")):
        for one in file.slices:
            digest.update(f"{one.box.name} {one.dtype} {one.shape}\n".encode())
        last = max(0, file.path.stat().st_size - _SAMPLE_BYTES)
        with file.path.open("rb", buffering=0) as opened:
            for number in range(_NUM_SAMPLES):
                opened.seek(number * last // (_NUM_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def holds_weights(folder: Path) -> bool:
    """Whether a folder has weights, be it in files that are not read, or that its index names and are not
    there."""
    return folder.is_dir() and any(
        path.suffix in (".safetensors", *_PICKLES) or path.name == INDEX for path in folder.iterdir()
    )
