"""Makes a checkpoint of weights in safetensors files, under the names that the model has for them."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zorselike.checkpoint.folder import commit, make_partial
from zorselike.checkpoint.layout import DTYPE_BYTES, slices_file
from zorselike.checkpoint.lease import Lease
from zorselike.checkpoint.manifest import FileRecord, Manifest, TensorRecord
from zorselike.checkpoint.slices import Slice, SlicesWriter
from zorselike.checkpoint.verify import OnBytes
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import VALUE, Box
from zorselike.version import __version__

_MAX_HEADER_BYTES = 100 * 10**6
"""More is refused by the safetensors library too."""
_BLOCK_BYTES = 16 * 2**20


class _Source:
    """A safetensors file of somebody else's: what its header says, which is checked."""

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


def import_files(files: Sequence[Path], folder: Path, *, progress: OnBytes | None = None) -> Path:
    """Makes a checkpoint of the model alone, of step 0, in a folder of checkpoints; returns its path.

    Args:
        files: safetensors files, or folders of them; no name twice.
        folder: of checkpoints; is made if need be.
        progress: is told of bytes copied.

    Raises:
        CheckpointError: A file is not what it must be, a name is there twice, or the folder has a complete
            checkpoint of step 0.
        OSError: The folder cannot be written.
    """
    sources = [_Source(path) for path in list_files(files)]
    places: dict[str, Path] = {}
    for source in sources:
        for one in source.slices:
            if one.box.name in places:
                raise CheckpointError(f"{one.box.name} is in {places[one.box.name]} and in {source.path}")
            places[one.box.name] = source.path
    lease = Lease(folder)
    try:
        partial = make_partial(folder, 0)
        try:
            records = tuple(_copy(source, partial, i, progress) for i, source in enumerate(sources))
            return commit(partial, _describe(sources, records))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        lease.release()


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Files for themselves, and of a folder its safetensors files; raises `CheckpointError` for none."""
    files = []
    for path in paths:
        found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not found:
            raise CheckpointError(f"{path}: holds no safetensors files")
        files += found
    return files


def _copy(source: _Source, partial: Path, number: int, progress: OnBytes | None) -> FileRecord:
    writer = SlicesWriter(partial, slices_file("model", number), source.slices)
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    try:
        with closing(source.path.open("rb", buffering=0)) as file:
            for one in source.slices:
                file.seek(source.offsets[one.box.name])
                left = one.num_bytes
                while True:  # Once for a tensor without elements too.
                    num_bytes = file.readinto(buffer[:left]) if left else 0
                    if left and not num_bytes:
                        raise CheckpointError(f"{source.path}: {one.box.name}: the file is cut off")
                    writer.append(buffer[:num_bytes])
                    left -= num_bytes
                    if progress is not None:
                        progress(num_bytes)
                    if not left:
                        break
        return writer.finish()
    finally:
        writer.abort()


def _describe(sources: Sequence[_Source], records: tuple[FileRecord, ...]) -> Manifest:
    return Manifest(
        step=0,
        rows_seen=0,
        seed=0,
        tensors={
            one.box.name: TensorRecord(one.shape, one.dtype, one.dtype, True)
            for source in sources
            for one in source.slices
        },
        files=records,
        aliases={},
        optimizer=None,
        loss_scale=None,
        schedule=None,
        plan=None,
        extra={"imported_from": [str(source.path) for source in sources]},
        versions={"zorselike": __version__, "python": platform.python_version()},
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
