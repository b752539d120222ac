"""Makes a checkpoint of weights in safetensors files, under the names that the model has for them."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from zorselike.checkpoint.folder import commit, make_partial
from zorselike.checkpoint.layout import slices_file
from zorselike.checkpoint.lease import Lease
from zorselike.checkpoint.manifest import FileRecord, Manifest, TensorRecord
from zorselike.checkpoint.safetensors_file import SafetensorsFile, list_files
from zorselike.checkpoint.slices import SlicesWriter
from zorselike.checkpoint.verify import OnBytes
from zorselike.errors import CheckpointError
from zorselike.version import __version__

_BLOCK_BYTES = 16 * 2**20


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
    sources = [SafetensorsFile(path) for path in list_files(files)]
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


def _copy(source: SafetensorsFile, partial: Path, number: int, progress: OnBytes | None) -> FileRecord:
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


def _describe(sources: Sequence[SafetensorsFile], records: tuple[FileRecord, ...]) -> Manifest:
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
