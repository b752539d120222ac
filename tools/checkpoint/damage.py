"""Files of a checkpoint that are not as they were saved."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zorselike.checkpoint.folder import find_newest
from zorselike.checkpoint.layout import DTYPE_BYTES, MANIFEST
from zorselike.checkpoint.manifest import FileRecord, Manifest, SliceRecord
from zorselike.checkpoint.read import SlicesReader, read_manifest
from zorselike.checkpoint.verify import verify
from zorselike.errors import CheckpointError

from .subject import OLD, OLDEST, Share, Subject, Tally, copies_of, make_base

_NUM_PAYLOAD_BITS = 1000


@dataclass(frozen=True)
class _Flip:
    """One bit of a file."""

    file: str
    bit: int
    record: FileRecord | None = None
    slice: SliceRecord | None = None
    """In which the bit is, if it is in a tensor."""

    def __str__(self) -> str:
        where = self.slice.entry if self.slice else "manifest" if self.record is None else "header"
        return f"bit {self.bit} of {self.file} ({where})"


def flip_bits(subject: Subject, scratch: Path, share: Share) -> Tally:
    """Every bit of the manifest and of headers, and random bits of tensors: each must be named with its file
    and tensor, by who checks all and by who loads."""
    tally = Tally("flips")
    folder = make_base(subject, scratch / "base")
    root = folder / f"step-{OLD:08}"
    manifest = read_manifest(root)
    for flip in share.of([*_list_flips(root, manifest)]):
        with (root / flip.file).open("r+b", buffering=0) as file:
            byte = _flip(file, flip.bit)
            tally.add(flip, _find_fault(folder, root, manifest, flip))
            file.seek(flip.bit // 8)
            file.write(byte)
    if verify(root):
        tally.add("at the end", "the files are not as they were")
    return tally


def _flip(file, bit: int) -> bytes:  # type: ignore[no-untyped-def]
    """Flips it and returns the byte that it was in."""
    file.seek(bit // 8)
    byte = file.read(1)
    file.seek(bit // 8)
    file.write(bytes([byte[0] ^ 1 << bit % 8]))
    return bytes(byte)


def _list_flips(root: Path, manifest: Manifest) -> Iterator[_Flip]:
    for bit in range(8 * (root / MANIFEST).stat().st_size):
        yield _Flip(MANIFEST, bit)
    for record in manifest.files:
        for bit in range(8 * record.header_bytes):
            yield _Flip(record.file, bit, record)
    rng = random.Random(0)
    slices = [(record, one) for record in manifest.files for one in record.slices if one.num_bytes]
    weights = [one.num_bytes for _, one in slices]
    for record, one in rng.choices(slices, weights, k=_NUM_PAYLOAD_BITS):
        bit = 8 * one.offset + rng.randrange(8 * one.num_bytes)
        yield _Flip(record.file, bit, record, one)


def _find_fault(folder: Path, root: Path, manifest: Manifest, flip: _Flip) -> str | None:
    """What is wrong with how it is found."""
    named = [(fault.file, fault.tensor) for fault in verify(root)]
    if named != [(flip.file, flip.slice.entry if flip.slice else None)]:
        return f"verify names {named}"
    newest, skipped = find_newest(folder)
    if flip.slice is None:
        if newest is None or newest.manifest.step != OLDEST:
            return "it is taken for complete"
        if len(skipped) != 1 or str(root / flip.file) not in skipped[0].reason:
            return f"it is passed over for {skipped}"
        return None
    with closing(SlicesReader(root, manifest)) as reader:
        try:
            _read_whole(reader, flip.slice)
        except CheckpointError as error:
            expected = f"{root / flip.file}: tensor {flip.slice.entry}: bytes "
            return None if str(error).startswith(expected) else f"loading says {error}"
    return "it is loaded"


def _read_whole(reader: SlicesReader, one: SliceRecord) -> None:
    reader.read_box(one.box, memoryview(bytearray(one.box.num_elements * DTYPE_BYTES[one.dtype])))


# -- whole files -----------------------------------------------------------------------------


def cut_files(subject: Subject, scratch: Path, share: Share) -> Tally:
    """Each file is deleted, cut, lengthened or replaced, or the whole is of a newer format: the older
    checkpoint must be found, and the file named."""
    tally = Tally("files")
    base = make_base(subject, scratch / "base")
    manifest = read_manifest(base / f"step-{OLD:08}")
    copies = copies_of(base, scratch)
    for file, what, hurt in share.of([*_list_damages(base / f"step-{OLD:08}", manifest)]):
        folder = next(copies)
        root = folder / f"step-{OLD:08}"
        hurt(root / file)
        newest, skipped = find_newest(folder)
        fault = None
        if newest is None or newest.manifest.step != OLDEST or subject.find_fault(newest):
            fault = "it is taken for complete"
        elif len(skipped) != 1 or str(root / file) not in skipped[0].reason:
            fault = f"it is passed over for {skipped}"
        elif file not in {own.file for own in verify(root)}:
            fault = "verify does not name it"
        elif what == "newer format" and "upgrade" not in skipped[0].reason:
            fault = skipped[0].reason
        tally.add(f"{file}: {what}", fault)
    return tally


def _list_damages(root: Path, manifest: Manifest) -> Iterator[tuple[str, str, Callable[[Path], object]]]:
    sizes = {MANIFEST: (root / MANIFEST).stat().st_size}
    places: dict[str, set[int]] = {MANIFEST: {0, 1, 10, sizes[MANIFEST] // 2, sizes[MANIFEST] - 2}}
    for record in manifest.files:
        sizes[record.file] = record.num_bytes
        ends = {one.offset + delta for one in record.slices for delta in (-1, 0, 1)}
        places[record.file] = {0, 1, 7, 8, 9, record.header_bytes // 2, *ends, record.num_bytes - 1}
    for file, size in sizes.items():
        yield file, "deleted", Path.unlink
        yield file, "a folder", _make_a_folder
        yield file, "zeros", lambda path: path.write_bytes(bytes(path.stat().st_size))
        yield file, "one byte more", lambda path: path.write_bytes(path.read_bytes() + b"\0")
        for place in sorted(place for place in places[file] if place < size):
            yield file, f"cut to {place}", partial(_cut_to, place)
    first, second = manifest.files[:2]
    yield first.file, f"is {second.file}", lambda path: shutil.copy(root / second.file, path)
    yield MANIFEST, "newer format", _make_newer


def _make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _cut_to(num_bytes: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def _make_newer(path: Path) -> None:
    """As a later version would write it, signed."""
    body = '"everything": "else"\n}\n'
    digest = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(f'{{"format": "zorselike-checkpoint", "version": 2, "sha256": "{digest}",\n{body}')
