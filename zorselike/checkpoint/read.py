"""Reads boxes of tensors from a checkpoint, every byte of them against its checksum."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path
from typing import IO

from zorselike.checkpoint.layout import CHUNK_BYTES, DTYPE_BYTES, MANIFEST, is_model_folder, step_of
from zorselike.checkpoint.manifest import FileRecord, Manifest, SliceRecord
from zorselike.checkpoint.slices import as_bytes
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import Box, subtract


def hint_elsewhere(root: Path) -> str:
    """Of a folder that is no checkpoint, what to do: it is a model, or checkpoints lie in it or one below."""
    if is_model_folder(root.name):
        return "; it is a model that a run handed on: `zorselike checkpoint import` makes a checkpoint of one"
    steps = [
        path for pattern in ("*", "*/*") for path in root.glob(pattern) if step_of(path.name) is not None
    ]
    return f"; there is {max(steps, key=lambda path: path.name)}" if steps else ""


def read_manifest(root: Path) -> Manifest:
    """The manifest of one step's folder.

    Raises:
        CheckpointError: There is none, or it is cut off, changed or of a newer version; names the file.
    """
    path = root / MANIFEST
    try:
        return Manifest.from_text(path.read_bytes().decode())
    except FileNotFoundError:
        if not root.exists():
            raise CheckpointError(f"{root}: there is no such folder") from None
        raise CheckpointError(
            f"{path}: is missing, so {root} is no complete checkpoint{hint_elsewhere(root)}"
        ) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is damaged: byte {error.start} is not text") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


class SlicesReader:
    """Reads the files of one step's folder, which stay open until `close`. For one thread."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._root, self._manifest = root, manifest
        self._opened: dict[str, IO[bytes]] = {}
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._holds: tuple[str, int, int] | None = None
        """File, offset of the slice and number of the chunk that `_chunk` holds."""
        self.num_bytes_read = 0

    def sees(self, file: str) -> bool:
        """Whether a file of the checkpoint is on this machine."""
        return (self._root / file).is_file()

    def check_files(self, files: Collection[str] | None = None) -> None:
        """Raises `CheckpointError` unless files (default: all) are there, as long as they were saved, with
        the headers that they were saved with."""
        for record in self._manifest.files:
            if files is None or record.file in files:
                self.check_file(record)

    def read_box(self, box: Box, target: memoryview) -> None:
        """Reads a part of a tensor, whichever slices it lies in.

        Args:
            box: what to read.
            target: its bytes, C-contiguous, of the dtype that was saved.

        Raises:
            CheckpointError: Something of it was not saved, or what was saved is damaged.
        """
        places = self._manifest.slices_of(box.name, box.kind)
        missing = [box] if box.num_elements else []
        for file, record in places:
            for part in missing:
                if (common := part.intersect(record.box)) is not None:
                    self._read_part(file, record, common, box, target)
            missing = [rest for part in missing for rest in subtract(part, record.box)]
        if missing:
            what = "values" if not places else f"elements from {missing[0].starts} to {missing[0].stops}"
            raise CheckpointError(
                f"{self._root}: holds no {what} of {box.name} ({box.kind}); it is of another model, or "
                "was saved without the optimizer"
            )

    def read(self, file: FileRecord, record: SliceRecord, box: Box, target: memoryview) -> None:
        """Reads a part of one slice.

        Args:
            file: where the slice is.
            record: the slice.
            box: what to read, inside the slice's.
            target: its bytes, C-contiguous.

        Raises:
            CheckpointError: The file is missing or shorter, or the bytes do not have their checksum.
        """
        self._read_part(file, record, box, box, target)

    def check_chunk(self, file: FileRecord, record: SliceRecord, number: int) -> None:
        """Raises `CheckpointError` unless one chunk of a slice is as it was saved."""
        self._holds = None
        size = min(CHUNK_BYTES, record.num_bytes - number * CHUNK_BYTES)
        self._read_chunk(file, record, number, self._chunk[:size])

    def check_file(self, record: FileRecord) -> bytes:
        """Raises `CheckpointError` unless a file is there with the size and header that were saved; returns
        the header, without its length."""
        file = self._open(record.file)
        size = os.fstat(file.fileno()).st_size
        if size != record.num_bytes:
            raise CheckpointError(
                f"{self._root / record.file}: has {size} bytes, and {record.num_bytes} were saved"
            )
        header = bytearray(record.header_bytes)
        self._fill(record.file, 0, memoryview(header))
        if zlib.crc32(header) != record.header_sum:
            raise CheckpointError(
                f"{self._root / record.file}: the header does not have the checksum it was saved with"
            )
        return bytes(header[8:])

    def close(self) -> None:
        for file in self._opened.values():
            file.close()
        self._opened.clear()

    def _read_part(
        self, file: FileRecord, record: SliceRecord, part: Box, box: Box, target: memoryview
    ) -> None:
        """`part` of `box`, whose bytes are `target`."""
        item_bytes = DTYPE_BYTES[record.dtype]
        if target.nbytes != box.num_elements * item_bytes:
            raise ValueError(f"{record.entry}: {target.nbytes} bytes cannot be {box.shape} of {record.dtype}")
        view = as_bytes(target)
        for first, at, num_elements in _list_runs(part, record.box, box):
            run = view[at * item_bytes : (at + num_elements) * item_bytes]
            self._read_run(file, record, first * item_bytes, run)

    def _read_run(self, file: FileRecord, record: SliceRecord, first: int, target: memoryview) -> None:
        """Bytes of a slice from `first` on: whole chunks go straight to where they are wanted."""
        while target:
            number = first // CHUNK_BYTES
            start = number * CHUNK_BYTES
            size = min(CHUNK_BYTES, record.num_bytes - start)
            wanted = target[: start + size - first]
            if len(wanted) == size:
                self._read_chunk(file, record, number, wanted)
            else:
                chunk = self._chunk[:size]
                if self._holds != (file.file, record.offset, number):
                    self._holds = None
                    self._read_chunk(file, record, number, chunk)
                    self._holds = (file.file, record.offset, number)
                wanted[:] = chunk[first - start : first - start + len(wanted)]
            first += len(wanted)
            target = target[len(wanted) :]

    def _read_chunk(self, file: FileRecord, record: SliceRecord, number: int, target: memoryview) -> None:
        start = number * CHUNK_BYTES
        self._fill(file.file, record.offset + start, target, record.entry)
        if zlib.crc32(target) != record.sums[number]:
            raise CheckpointError(
                f"{self._root / file.file}: tensor {record.entry}: bytes {start} to "
                f"{start + len(target) - 1} do not have the checksum they were saved with"
            )

    def _open(self, file: str) -> IO[bytes]:
        if file not in self._opened:
            path = self._root / file
            try:
                self._opened[file] = path.open("rb", buffering=0)
            except FileNotFoundError:
                raise CheckpointError(f"{path}: is missing") from None
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        return self._opened[file]

    def _fill(self, file: str, offset: int, target: memoryview, entry: str = "") -> None:
        """Reads bytes of a file from `offset` on."""
        opened = self._open(file)
        where = f"{self._root / file}: " + (f"tensor {entry}: " if entry else "")
        try:
            opened.seek(offset)
            while target:
                num_bytes = opened.readinto(target)  # type: ignore[attr-defined]
                if not num_bytes:
                    raise CheckpointError(f"{where}the file is cut off")
                self.num_bytes_read += num_bytes
                target = target[num_bytes:]
        except OSError as error:
            raise CheckpointError(f"{where}cannot be read: {error.strerror}") from None


def _list_runs(part: Box, source: Box, target: Box) -> Iterator[tuple[int, int, int]]:
    """The elements of `part`, which is inside both others, that are contiguous in both: the number of the
    first one in each, and how many."""
    axis, num_elements = len(part.starts), 1
    while axis and part.shape[axis:] == source.shape[axis:] == target.shape[axis:]:
        axis -= 1
        num_elements *= part.shape[axis]
    if not part.num_elements:
        return
    for outer in product(*(range(extent) for extent in part.shape[:axis])):
        starts = [start + (outer[i] if i < axis else 0) for i, start in enumerate(part.starts)]
        yield _number_of(starts, source), _number_of(starts, target), num_elements


def _number_of(place: list[int], box: Box) -> int:
    """Of the element at a place of the tensor, counted in a box."""
    number = 0
    for at, start, extent in zip(place, box.starts, box.shape, strict=True):
        number = number * extent + at - start
    return number
