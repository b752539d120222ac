"""Slices written and read back: by us, by the safetensors library, by torch's own checkpoint reader."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import (
    cut,
    divide,
    load,
    make_manifest,
    make_tensors,
    save,
    whole_box,
    write_file,
    write_files,
)
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from zorselike.checkpoint import layout, read, slices
from zorselike.checkpoint.layout import CHUNK_BYTES, entry_name, slices_file
from zorselike.checkpoint.manifest import FileRecord
from zorselike.checkpoint.read import SlicesReader, read_manifest
from zorselike.checkpoint.slices import Slice, SlicesWriter
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import VALUE, Box


@pytest.mark.parametrize("columns", [False, True])
def test_what_is_written_is_read_back(tmp_path: Path, columns: bool) -> None:
    tensors = make_tensors()
    root = save(tmp_path, 3, tensors, columns=columns)
    found = load(root, read_manifest(root), tensors)
    for key, array in tensors.items():
        np.testing.assert_array_equal(found[key], array)


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    tensors = make_tensors()
    for file in write_files(tmp_path, tensors):
        found = load_file(tmp_path / file.file)
        assert set(found) == {record.entry for record in file.slices}
        for record in file.slices:
            expected = cut(tensors[record.box.name, record.box.kind], record.box)
            np.testing.assert_array_equal(found[record.entry], expected)


@pytest.mark.parametrize("part", ["model", "optim"])
@pytest.mark.parametrize("columns", [False, True])
def test_torch_reads_the_files(tmp_path: Path, part: str, columns: bool) -> None:
    tensors = {key: array for key, array in make_tensors().items() if (key[1] == VALUE) == (part == "model")}
    write_files(tmp_path, tensors, columns=columns)
    state = {entry_name(*key): torch.zeros_like(torch.from_numpy(array)) for key, array in tensors.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / part)), no_dist=True)
    for key, array in tensors.items():
        assert torch.equal(state[entry_name(*key)], torch.from_numpy(array))


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.integers(2, 9)) for _ in range(draw(st.sampled_from([2, 3, 1, 0]))))
    ends = [sorted(draw(st.sets(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
    return shape, Box("w", VALUE, tuple(a for a, _ in ends), tuple(b for _, b in ends))


@given(parts(), st.integers(0, 2**32), st.integers(0, 1), st.sampled_from([8, 16, 64]))
@example(((6, 8), Box("w", VALUE, (1, 2), (5, 5))), 0, 0, 16)
@example(((6, 8), Box("w", VALUE, (1, 2), (5, 5))), 0, 1, 16)
@example(((6, 8), Box("w", VALUE, (3, 2), (3, 2))), 0, 0, 16)
@example(((2, 5, 2), Box("w", VALUE, (0, 0, 0), (1, 5, 1))), 0, 0, 16)
def test_any_part_is_read_with_the_chunks_it_touches(
    tmp_path_factory: pytest.TempPathFactory,
    part: tuple[tuple[int, ...], Box],
    seed: int,
    columns: int,
    chunk_bytes: int,
) -> None:
    shape, box = part
    tensors = {("w", VALUE): np.random.default_rng(seed).standard_normal(shape)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(read, "CHUNK_BYTES", chunk_bytes)
        root = tmp_path_factory.mktemp("root")
        files = write_files(root, tensors, seed=seed, columns=bool(columns), num_ranks=4)
        reader = SlicesReader(root, make_manifest(0, files, tensors))
        target = np.full(box.shape, np.nan)
        reader.read_box(box, memoryview(target))
        reader.close()
    np.testing.assert_array_equal(target, cut(tensors["w", VALUE], box))
    if not columns and target.size:  # Rows are one range of every slice.
        first, last = (np.ravel_multi_index(at, shape) for at in (box.starts, np.subtract(box.stops, 1)))
        limit = 8 * (last - first + 1) + 2 * (chunk_bytes - 8) * sum(len(file.slices) for file in files)
        assert reader.num_bytes_read <= limit


def test_neighbours_share_the_chunk_between_them(tmp_path: Path) -> None:
    array = np.arange(64.0)
    box = whole_box(("w", VALUE), {("w", VALUE): array})
    file = write_file(tmp_path, slices_file("model", 0), [box], {("w", VALUE): array})
    reader = SlicesReader(tmp_path, make_manifest(0, (file,), {("w", VALUE): array}))
    for row in range(64):
        target = np.empty(1)
        reader.read_box(Box("w", VALUE, (row,), (row + 1,)), memoryview(target))
        assert target == row
    reader.close()
    assert reader.num_bytes_read == array.nbytes


def test_large_slices_have_a_checksum_every_chunk(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((3, CHUNK_BYTES // 8 // 2 + 1))
    tensors = {("w", VALUE): array}
    file = write_file(tmp_path, slices_file("model", 0), [whole_box(("w", VALUE), tensors)], tensors)
    assert len(file.slices[0].sums) == 2
    with (tmp_path / file.file).open("r+b") as opened:
        opened.seek(file.header_bytes + CHUNK_BYTES + 5)
        flipped = opened.read(1)[0] ^ 1
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([flipped]))
    reader = SlicesReader(tmp_path, make_manifest(0, (file,), tensors))
    target = np.empty((1, array.shape[1]))
    reader.read_box(Box("w", VALUE, (0, 0), (1, array.shape[1])), memoryview(target))
    np.testing.assert_array_equal(target, array[:1])
    with pytest.raises(CheckpointError) as raised:
        reader.read_box(Box("w", VALUE, (2, 0), array.shape), memoryview(target))
    reader.close()
    where = f"{CHUNK_BYTES} to {array.nbytes - 1}"
    assert str(raised.value).startswith(
        f"{tmp_path / file.file}: tensor w: bytes {where} do not have the checksum"
    )


def test_what_nobody_saved_is_missed(tmp_path: Path) -> None:
    tensors = make_tensors()
    box = Box("a.w", VALUE, (0, 0), (6, 5))
    file = write_file(tmp_path, slices_file("model", 0), [box], tensors)
    reader = SlicesReader(tmp_path, make_manifest(0, (file,), tensors))
    with pytest.raises(CheckpointError, match=r"no elements from \(6, 0\) to \(7, 5\) of a.w"):
        reader.read_box(whole_box(("a.w", VALUE), tensors), memoryview(np.empty((7, 5), np.float32)))
    with pytest.raises(CheckpointError, match=r"no values of a.w \(exp_avg\)"):
        reader.read_box(whole_box(("a.w", "exp_avg"), tensors), memoryview(np.empty((7, 5), np.float32)))
    with pytest.raises(ValueError, match="cannot be"):
        reader.read_box(box, memoryview(np.empty((6, 5))))
    reader.close()


def hurt_size(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def hurt_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"F32")] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("hurt", "said"),
    [(Path.unlink, "is missing"), (hurt_size, "bytes, and"), (hurt_header, "the header does not")],
)
def test_files_that_are_not_as_saved_are_named(
    tmp_path: Path, hurt: Callable[[Path], None], said: str
) -> None:
    root = save(tmp_path, 1, make_tensors())
    manifest = read_manifest(root)
    files = [file.file for file in manifest.files]
    hurt(root / files[1])
    reader = SlicesReader(root, manifest)
    reader.check_files([files[0]])
    with pytest.raises(CheckpointError, match=said) as raised:
        reader.check_files()
    assert str(root / files[1]) in str(raised.value)
    assert reader.sees(files[1]) == (hurt is not Path.unlink)
    reader.close()


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    tensors = make_tensors()
    write_file(tmp_path, slices_file("model", 0), [whole_box(("a.b", VALUE), tensors)], tensors)
    with pytest.raises(FileExistsError):
        SlicesWriter(tmp_path, slices_file("model", 0), [])


def test_a_writer_wants_every_slice_whole(tmp_path: Path) -> None:
    described = Slice(Box("w", VALUE, (0,), (4,)), "F32", (4,))
    writer = SlicesWriter(tmp_path, slices_file("model", 0), [described])
    with pytest.raises(ValueError, match="12 bytes, expected 16"):
        writer.write(memoryview(np.zeros(3, np.float32)))
    with pytest.raises(ValueError, match="w was not written"):
        writer.finish()
    writer.abort()
    with pytest.raises(ValueError, match="twice"):
        SlicesWriter(tmp_path, slices_file("model", 1), [described, described])


def test_short_writes_are_continued_and_errors_name_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make_tensors()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:7]))
    (file,) = write_files(tmp_path, {("a.w", VALUE): tensors["a.w", VALUE]}, num_ranks=1)
    np.testing.assert_array_equal(load_file(tmp_path / file.file)["a.w"], tensors["a.w", VALUE])

    def fail(descriptor: int, view: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    path = slices_file("model", 7)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="No space left") as raised:
        write_file(tmp_path, path, [whole_box(("a.w", VALUE), tensors)], tensors)
    assert raised.value.filename == str(tmp_path / path) and raised.value.errno == errno.ENOSPC
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


def test_empty_slices_and_no_slices_are_files(tmp_path: Path) -> None:
    tensors = {("none", VALUE): np.zeros((0, 3), np.float32)}
    (file,) = write_files(tmp_path, tensors, num_ranks=1)
    assert load_file(tmp_path / file.file)["none"].shape == (0, 3)
    empty = write_file(tmp_path, slices_file("model", 5), [], tensors)
    assert load_file(tmp_path / empty.file) == {}
    for record in (file, empty):
        assert FileRecord.from_table(
            record.to_table() | {"slices": [s.to_table() | lists(s) for s in record.slices]}
        )


def lists(record: object) -> dict[str, list[int]]:
    """As JSON gives tuples back."""
    table = record.to_table()  # type: ignore[attr-defined]
    return {key: list(value) for key, value in table.items() if isinstance(value, tuple)}


def test_random_division_covers_a_box() -> None:
    box = Box("w", VALUE, (0, 0), (6, 4))
    boxes = divide(box, random.Random(0), 5, columns=True)
    assert sum(part.num_elements for part in boxes) == box.num_elements
    assert layout.step_folder(1200) == "step-00001200"
