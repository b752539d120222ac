"""Weights in safetensors files of whole tensors, as Hugging Face's libraries lay them out:
`model.safetensors`, or numbered files and an index."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zorselike.checkpoint.layout import DTYPE_BYTES, MANIFEST, step_of
from zorselike.checkpoint.manifest import FileRecord, Manifest, SliceRecord, TensorRecord
from zorselike.checkpoint.slices import Slice
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import VALUE, Box

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_PICKLES = ("*.bin", "*.pt", "*.pth")
_MAX_HEADER_BYTES = 100 * 10**6
"""More is refused by the safetensors library too."""


class WholeTensors:
    """What the header of a safetensors file says, which is checked.

    Raises:
        CheckpointError: It cannot be read, or is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offsets: dict[str, int] = {}
        """From the file's start."""
        self.slices: list[Slice] = []
        self.num_bytes = 0
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                    raise ValueError("the length of its header is wrong")
                file.seek(0)
                self._header = file.read(8 + length)
                self._read(json.loads(self._header[8:]), 8 + length, size)
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
        self.num_bytes = size

    def record(self) -> FileRecord:
        """As a checkpoint's file, of which nobody has kept checksums."""
        slices = (
            SliceRecord(one.box, one.dtype, one.shape, self.offsets[one.box.name], ()) for one in self.slices
        )
        return FileRecord(self.path.name, self.num_bytes, zlib.crc32(self._header), tuple(slices))


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Files for themselves, and of a folder those of its weights; raises `CheckpointError` for none."""
    return [file for path in paths for file in (_list_folder(path) if path.is_dir() else [path])]


def _list_folder(folder: Path) -> list[Path]:
    """Those of the index, else `model.safetensors`, else all: the same weights may be there in another form
    too."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            if not all(name == Path(name).name for name in names):
                raise ValueError("it names files elsewhere")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index}: is no index of safetensors files, or damaged: {error}") from None
        return [folder / name for name in sorted(names)]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        why = f"; {pickles[0]} is a pickle, which is not read: save it as safetensors" if pickles else ""
        raise CheckpointError(f"{folder}: holds no safetensors files{why}")
    return found


def open_files(paths: Sequence[Path]) -> list[WholeTensors]:
    """Raises `CheckpointError` where one is not what it must be, or two hold a tensor of the same name."""
    files = [WholeTensors(path) for path in paths]
    places: dict[str, Path] = {}
    for file in files:
        for one in file.slices:
            if one.box.name in places:
                raise CheckpointError(f"{one.box.name} is in {places[one.box.name]} and in {file.path}")
            places[one.box.name] = file.path
    return files


def describe_files(files: Sequence[WholeTensors], records: Sequence[FileRecord], **facts: Any) -> Manifest:
    """The manifest of a model alone, of step 0; `facts`: what else is known, else nothing."""
    return Manifest(
        step=0,
        rows_seen=0,
        seed=0,
        tensors={
            one.box.name: TensorRecord(one.shape, one.dtype, one.dtype, True)
            for file in files
            for one in file.slices
        },
        files=tuple(records),
        aliases={},
        optimizer=None,
        loss_scale=None,
        schedule=None,
        plan=None,
        extra=facts.get("extra", {}),
        versions=facts.get("versions", {}),
        saved_at=facts.get("saved_at", ""),
    )


def holds_weights(folder: Path) -> bool:
    """Whether a folder is of somebody else's weights, in files that are read or that are not."""
    return (
        step_of(folder.name) is None
        and not (folder / MANIFEST).exists()
        and any(any(folder.glob(pattern)) for pattern in ("*.safetensors", *_PICKLES))
    )


def read_weights(folder: Path) -> Manifest:
    """What a folder of somebody else's weights holds, as if it were a checkpoint; nothing has a checksum.

    Raises:
        CheckpointError: It holds none, or they are not what they must be.
    """
    files = open_files(list_files([folder]))
    return describe_files(files, [file.record() for file in files])
