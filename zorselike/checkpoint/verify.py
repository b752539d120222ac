"""Checks every byte of a checkpoint, and that it holds every tensor once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zorselike.checkpoint.coverage import find_gaps
from zorselike.checkpoint.layout import CHUNK_BYTES, MANIFEST
from zorselike.checkpoint.manifest import FileRecord, Manifest
from zorselike.checkpoint.read import SlicesReader, read_manifest
from zorselike.errors import CheckpointError

OnBytes = Callable[[int], object]
"""Called with numbers of bytes that have been dealt with."""


@dataclass(frozen=True)
class Fault:
    """Something that is not as it was saved."""

    file: str
    """In the step's folder."""
    tensor: str | None
    """As the file calls it; None where it is not of one tensor."""
    what: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.tensor, self.what) if part)


def verify(root: Path, *, progress: OnBytes | None = None) -> list[Fault]:
    """Everything that is wrong with the checkpoint in a step's folder."""
    try:
        manifest = read_manifest(root)
    except CheckpointError as error:
        return [Fault(MANIFEST, None, str(error).removeprefix(f"{root / MANIFEST}: "))]
    gaps = (Fault(MANIFEST, entry, fault) for entry, fault in find_gaps(manifest))
    faults = [*gaps, *_find_strangers(root, manifest)]
    reader = SlicesReader(root, manifest)
    try:
        for file in manifest.files:
            faults += _check_file(root, reader, file, progress or (lambda num_bytes: None))
    finally:
        reader.close()
    return faults


def _check_file(root: Path, reader: SlicesReader, file: FileRecord, progress: OnBytes) -> Iterator[Fault]:
    path = root / file.file
    try:
        yield from _compare_header(file, reader.check_file(file))
    except CheckpointError as error:
        yield Fault(file.file, None, str(error).removeprefix(f"{path}: "))
        if not path.is_file():
            return
    progress(file.header_bytes)
    for record in file.slices:
        faults = []
        for number in range(len(record.sums)):
            try:
                reader.check_chunk(file, record, number)
            except CheckpointError as error:
                faults.append(str(error).removeprefix(f"{path}: tensor {record.entry}: "))
            progress(min(CHUNK_BYTES, record.num_bytes - number * CHUNK_BYTES))
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            yield Fault(file.file, record.entry, faults[0] + more)


def _compare_header(file: FileRecord, header: bytes) -> Iterator[Fault]:
    """Whether a header that is as it was saved says what the manifest says."""
    try:
        entries = dict(json.loads(header))
    except (ValueError, TypeError, RecursionError):
        yield Fault(file.file, None, "the header is not JSON")
        return
    entries.pop("__metadata__", None)
    for record in file.slices:
        begin = record.offset - file.header_bytes
        said = {
            "dtype": record.dtype,
            "shape": list(record.box.shape),
            "data_offsets": [begin, begin + record.num_bytes],
        }
        if entries.pop(record.entry, None) != said:
            yield Fault(file.file, record.entry, "header and manifest contradict each other")
    for name in entries:
        yield Fault(file.file, name, "is not in the manifest")


def _find_strangers(root: Path, manifest: Manifest) -> Iterator[Fault]:
    known = {MANIFEST, *(file.file for file in manifest.files)}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name not in known and not path.is_dir():
            yield Fault(name, None, "is no part of the checkpoint; nothing reads it")
