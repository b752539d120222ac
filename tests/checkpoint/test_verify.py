"""Whatever is wrong with a checkpoint is named with its file and tensor."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import make_manifest, make_tensors, save, whole_box, write_file, write_files

from zorselike.checkpoint.folder import commit, make_partial
from zorselike.checkpoint.layout import CHUNK_BYTES, MANIFEST, slices_file, step_folder
from zorselike.checkpoint.read import read_manifest
from zorselike.checkpoint.verify import Fault, verify
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import VALUE, Box

TENSORS = make_tensors()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved"), 7, TENSORS, columns=True)


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def test_a_good_one_has_no_faults_and_every_byte_is_counted(saved: Path) -> None:
    done: list[int] = []
    assert verify(saved, progress=done.append) == []
    assert sum(done) == read_manifest(saved).num_bytes


def test_random_flips_are_named(root: Path) -> None:
    manifest = read_manifest(root)
    rng = random.Random(0)
    for _ in range(40):
        file = rng.choice(manifest.files)
        at = rng.randrange(file.num_bytes)
        content = bytearray((root / file.file).read_bytes())
        bit = rng.randrange(8)
        content[at] ^= 1 << bit
        (root / file.file).write_bytes(content)
        (fault,) = verify(root)
        hit = [one.entry for one in file.slices if one.offset <= at < one.offset + one.num_bytes]
        assert (fault.file, fault.tensor) == (file.file, hit[0] if hit else None)
        assert "do not have the checksum" in fault.what or "the header does not" in fault.what
        content[at] ^= 1 << bit
        (root / file.file).write_bytes(content)


def test_every_tensor_behind_a_cut_is_named(root: Path) -> None:
    file = read_manifest(root).files[0]
    cut = file.slices[-1].offset - 1
    os.truncate(root / file.file, cut)
    assert verify(root) == [
        Fault(file.file, None, f"has {cut} bytes, and {file.num_bytes} were saved"),
        Fault(file.file, file.slices[-2].entry, "the file is cut off"),
        Fault(file.file, file.slices[-1].entry, "the file is cut off"),
    ]


def test_missing_and_unknown_files_are_named(root: Path) -> None:
    file = read_manifest(root).files[0].file
    (root / file).unlink()
    (root / ".metadata").write_bytes(b"\x80")
    (root / "model" / "rank-00009.safetensors").write_bytes(b"")
    faults = verify(root)
    assert {(fault.file, fault.what) for fault in faults} == {
        (".metadata", "is no part of the checkpoint; nothing reads it"),
        ("model/rank-00009.safetensors", "is no part of the checkpoint; nothing reads it"),
        (file, "is missing"),
    }
    assert str(faults[-1]) == f"{file}: is missing"


def test_without_a_manifest_nothing_else_is_said(root: Path) -> None:
    (root / "manifest.json").unlink()
    (fault,) = verify(root)
    assert fault.file == "manifest.json" and fault.what.startswith("is missing")


def test_a_slice_of_many_chunks_is_named_once(tmp_path: Path) -> None:
    tensors = {("w", VALUE): np.zeros(3 * CHUNK_BYTES // 4, np.float32)}
    root = save(tmp_path, 1, tensors, seed=3)
    file = max(read_manifest(root).files, key=lambda file: file.num_bytes)
    content = bytearray((root / file.file).read_bytes())
    for at in range(file.header_bytes, len(content), CHUNK_BYTES // 2):
        content[at] ^= 1
    (root / file.file).write_bytes(content)
    (fault,) = verify(root)
    assert fault.tensor == "w" and fault.what.endswith("more)")


def test_tensors_that_are_not_there_once_are_named(tmp_path: Path) -> None:
    tensors = {key: array for key, array in TENSORS.items() if key[0] == "a.w"}
    partial = make_partial(tmp_path, 1)
    whole = whole_box(("a.w", VALUE), tensors)
    boxes = [
        [Box("a.w", VALUE, (0, 0), (4, 5)), Box("a.w", "exp_avg", (0, 0), (4, 5))],
        [Box("a.w", VALUE, (3, 0), (7, 5)), Box("a.w", "exp_avg", (5, 0), (7, 5))],
    ]
    files = tuple(
        write_file(partial, slices_file("model", rank), own, tensors) for rank, own in enumerate(boxes)
    )
    manifest = make_manifest(1, files, {("a.w", VALUE): tensors["a.w", VALUE]})
    with pytest.raises(CheckpointError, match=r"a\.w: some of it was saved twice"):
        commit(partial, manifest)
    (partial / MANIFEST).write_text(manifest.to_text())
    root = partial.rename(tmp_path / step_folder(1))
    assert whole.shape == (7, 5)
    assert verify(root) == [
        Fault("manifest.json", "a.w", "some of it was saved twice"),
        Fault("manifest.json", "exp_avg.a.w", "nobody saved what is from (4, 0) to (5, 5)"),
    ]


def test_a_header_that_contradicts_the_manifest_is_named(tmp_path: Path) -> None:
    partial = make_partial(tmp_path, 1)
    files = write_files(partial, TENSORS)
    slices = files[0].slices
    swapped = replace(files[0], slices=(replace(slices[0], dtype="I32"), *slices[1:]))
    manifest = make_manifest(1, (swapped, *files[1:]), TENSORS)
    root = commit(partial, manifest)
    assert verify(root) == [
        Fault(files[0].file, slices[0].entry, "header and manifest contradict each other")
    ]
