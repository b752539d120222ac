"""Writes slices of tensors as a safetensors file, one after another, with their checksums.

The format is public: 8 little-endian bytes with the length of a JSON header, the header, the tensors' bytes
without gaps (https://huggingface.co/docs/safetensors). The safetensors library reads what is written here;
its own writer wants all tensors in memory at once and sums nothing, so this streams the file itself. Nothing
is copied: whoever writes hands over views of host memory.

The header says where each slice lies in its tensor as `torch.distributed.checkpoint` does
(`DCP_SHARDING_INFO`), so that `torch.distributed.checkpoint.load` with a `HuggingFaceStorageReader` reads
these files too.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zorselike.checkpoint.layout import CHUNK_BYTES, DTYPE_BYTES, entry_name
from zorselike.checkpoint.manifest import FileRecord, SliceRecord
from zorselike.plan.holdings import Box

_ALIGNMENT = 8
"""Of the first tensor's bytes in the file, which readers that map the file count on."""


@dataclass(frozen=True)
class Slice:
    """What a file is to hold of one tensor."""

    box: Box
    dtype: str
    """Its name in safetensors."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def entry(self) -> str:
        return entry_name(self.box.name, self.box.kind)

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * DTYPE_BYTES[self.dtype]


class SlicesWriter:
    """Streams one file, which it makes anew; `OSError` names the file wherever something fails."""

    def __init__(self, root: Path, file: str, slices: Sequence[Slice], *, says_where: bool = True) -> None:
        """Makes the file and the folders above it and writes its header.

        Args:
            root: the step's folder.
            file: path inside it (`layout.slices_file`).
            slices: in the order in which they will be written; of one tensor at most one.
            says_where: whether the header says where slices lie; files of whole tensors need not.
        """
        self._file, self._slices = file, tuple(slices)
        self._records: list[SliceRecord] = []
        self._begun, self._sums = 0, [0]
        """Bytes of the slice that is being written, and checksums of its chunks, the last one unfinished."""
        self._path = root / file
        header = _make_header(self._slices, says_where=says_where)
        self._header_sum = zlib.crc32(header)
        self._offset = len(header)
        with name_errors(self._path):
            make_folders(self._path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
            self._descriptor: int | None = os.open(self._path, flags, 0o666)
        try:
            self._write(memoryview(header))
        except BaseException:
            self.abort()
            raise

    def write(self, content: memoryview) -> None:
        """Writes all bytes of the next slice, C-contiguous and little-endian."""
        described = self._slices[len(self._records)]
        if content.nbytes != described.num_bytes:
            raise ValueError(f"{described.entry}: {content.nbytes} bytes, expected {described.num_bytes}")
        self.append(content)

    def append(self, content: memoryview) -> None:
        """Writes the bytes of a slice that follow what there is of it."""
        described = self._slices[len(self._records)]
        view = as_bytes(content)
        while view:
            chunk = view[: CHUNK_BYTES - self._begun % CHUNK_BYTES]
            self._sums[-1] = zlib.crc32(chunk, self._sums[-1])
            self._write(chunk)
            self._begun += len(chunk)
            if self._begun % CHUNK_BYTES == 0:
                self._sums.append(0)
            view = view[len(chunk) :]
        if self._begun == described.num_bytes:
            sums = tuple(self._sums[: -(-self._begun // CHUNK_BYTES)])
            self._records.append(
                SliceRecord(described.box, described.dtype, described.shape, self._offset, sums)
            )
            self._offset += self._begun
            self._begun, self._sums = 0, [0]

    def finish(self) -> FileRecord:
        """Makes sure that the file is on the disk and closes it."""
        if len(self._records) < len(self._slices):
            raise ValueError(f"{self._path}: {self._slices[len(self._records)].entry} was not written")
        assert self._descriptor is not None
        try:
            with name_errors(self._path):
                os.fsync(self._descriptor)
                descriptor, self._descriptor = self._descriptor, None
                os.close(descriptor)
            sync_folder(self._path.parent)
        except BaseException:
            self.abort()
            raise
        return FileRecord(self._file, self._offset, self._header_sum, tuple(self._records))

    def abort(self) -> None:
        """Closes the file, whatever it holds; to be called where something else failed."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _write(self, view: memoryview) -> None:
        assert self._descriptor is not None
        with name_errors(self._path):
            write_all(self._descriptor, view)


def _make_header(slices: Sequence[Slice], *, says_where: bool) -> bytes:
    """With the 8 bytes of its length."""
    entries: dict[str, object] = {}
    end = 0
    for one in slices:
        if one.entry in entries or one.entry == "__metadata__":
            raise ValueError(f"{one.entry} is twice in one file")
        begin, end = end, end + one.num_bytes
        entries[one.entry] = {"dtype": one.dtype, "shape": one.box.shape, "data_offsets": (begin, end)}
    placed = {one.entry: {"saved_offsets": one.box.starts} for one in slices}
    metadata = {"format": "pt"} | ({"DCP_SHARDING_INFO": json.dumps(placed)} if says_where else {})
    header = json.dumps({"__metadata__": metadata} | entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


# -- files -----------------------------------------------------------------------------------


def as_bytes(view: memoryview) -> memoryview:
    """The same memory as plain bytes, which nothing is left of where a dimension is 0."""
    return view.cast("B") if view.nbytes else memoryview(b"")


def write_all(descriptor: int, view: memoryview) -> None:
    """`os.write` may write less than it is given."""
    while view:
        view = view[os.write(descriptor, view) :]


def write_file(path: Path, content: bytes) -> None:
    """Writes a new file and makes sure that it is on the disk."""
    with name_errors(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(descriptor, memoryview(content))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Makes a folder and those above it, unless they are there."""
    if not folder.is_dir():
        make_folders(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)  # noqa: PTH102  # What makes, writes and syncs is called as `os.` alone.


def sync_folder(folder: Path) -> None:
    """Makes sure that the names in a folder are on the disk."""
    with name_errors(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Errors of the system that name no file get this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
