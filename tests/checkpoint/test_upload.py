"""Checkpoints copied to a store: there when the manifest is, which comes last."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from checkpoint_files import make_tensors, save

from zorselike.checkpoint.folder import find_newest
from zorselike.checkpoint.read import read_manifest
from zorselike.checkpoint.upload import check_target, upload
from zorselike.checkpoint.verify import verify
from zorselike.errors import CheckpointError

TENSORS = make_tensors()
URL = "memory://bucket/run/"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return save(tmp_path / "run", 7, TENSORS)


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    store = fsspec.filesystem("memory")
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def names_in(store: fsspec.AbstractFileSystem) -> list[str]:
    return sorted(name.removeprefix("/bucket/run/step-00000007/") for name in store.find("/"))


def test_a_folder_is_copied(root: Path, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    assert upload(root, url)
    found, skipped = find_newest(tmp_path / "store")
    assert found is not None and not skipped and verify(found.path) == []
    assert upload(root, url)  # Again: nothing to do.


def test_the_manifest_comes_last(
    root: Path, store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [file.file for file in read_manifest(root).files]
    put, seen = type(store).put_file, []

    def watch(self: fsspec.AbstractFileSystem, source: str, target: str) -> None:
        seen.append(names_in(store))
        if len(seen) == 3:
            raise RuntimeError("the store is away\nfor a while")
        put(self, source, target)

    monkeypatch.setattr(type(store), "put_file", watch)
    with pytest.raises(CheckpointError) as raised:
        upload(root, URL)
    assert str(raised.value) == (
        f"{URL}step-00000007: could not be given {files[2]}: RuntimeError: the store is away"
    )
    assert names_in(store) == sorted(files[:2])
    assert upload(root, URL)
    assert names_in(store) == sorted([*files, "manifest.json"])
    assert all("manifest.json" not in names for names in seen)


def test_another_checkpoint_of_the_step_stays(
    root: Path, tmp_path: Path, store: fsspec.AbstractFileSystem
) -> None:
    upload(root, URL)
    other = save(tmp_path / "other", 7, make_tensors(1))
    before = store.cat_file("/bucket/run/step-00000007/manifest.json")
    with pytest.raises(CheckpointError, match="another checkpoint of this step"):
        upload(other, URL)
    assert store.cat_file("/bucket/run/step-00000007/manifest.json") == before


def test_nodes_copy_what_they_have(root: Path, tmp_path: Path, store: fsspec.AbstractFileSystem) -> None:
    files = read_manifest(root).files
    for node in (0, 1):
        own = tmp_path / f"node{node}" / root.name
        shutil.copytree(root, own)
        for file in files[node::2]:
            (own / file.file).unlink()
        assert upload(own, URL) is (node == 1)
        assert ("manifest.json" in names_in(store)) is (node == 1)


def test_a_store_that_is_not_there_is_named(root: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing://x/step-00000007: could not be opened: "):
        upload(root, "nothing://x")
    with pytest.raises(CheckpointError, match=r"nothing://x: cannot be opened: "):
        check_target("nothing://x")


def test_a_target_is_tried_and_left_as_it_was(tmp_path: Path, store: fsspec.AbstractFileSystem) -> None:
    check_target(URL)
    assert store.find("/") == []
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file: cannot be written to: "):
        check_target(f"file://{tmp_path}/file")
