"""Folders of checkpoints: the newest complete one, what is in its way, what may be deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoint_files import load, make_manifest, make_tensors, save, write_files

from zorselike.checkpoint import folder as folders
from zorselike.checkpoint.folder import commit, find_newest, list_steps, make_partial, prune, remove_partials
from zorselike.checkpoint.layout import MANIFEST, partial_folder, step_folder
from zorselike.checkpoint.manifest import Manifest
from zorselike.checkpoint.read import read_manifest
from zorselike.errors import CheckpointError

TENSORS = make_tensors()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of steps 10 to 50."""
    folder = tmp_path_factory.mktemp("saved") / "new" / "folder"
    for step in (10, 30, 20, 50, 40):
        save(folder, step, TENSORS)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "folder"))


def steps_of(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_steps(folder)]


def newest(folder: Path) -> tuple[int | None, list[str]]:
    found, skipped = find_newest(folder)
    assert all(reason.reason.startswith(str(reason.path)) for reason in skipped)
    return found and found.manifest.step, [reason.path.name for reason in skipped]


def test_the_newest_is_found_and_holds_what_was_saved(folder: Path) -> None:
    assert steps_of(folder) == [50, 40, 30, 20, 10]
    found, skipped = find_newest(folder)
    assert found is not None and found.path == folder / "step-00000050" and skipped == ()
    assert (
        load(found.path, found.manifest, TENSORS)["a.w", "value"].tobytes()
        == TENSORS["a.w", "value"].tobytes()
    )


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert find_newest(tmp_path / "none") == (None, ())
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-00000001").write_text("a file")
    assert find_newest(tmp_path) == (None, ())
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        find_newest(tmp_path / "step-00000001")


def test_a_folder_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    """It was `manifest.json: is missing`, whether the folder was there or not."""
    with pytest.raises(CheckpointError, match="nowhere: there is no such folder"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"is missing, so .* is no complete checkpoint"):
        read_manifest(tmp_path)


def test_those_that_are_not_complete_are_passed_over_and_named(folder: Path) -> None:
    (folder / step_folder(50) / MANIFEST).unlink()
    file = next((folder / step_folder(40)).glob("optim/*"))
    file.write_bytes(file.read_bytes()[:-1])
    text = (folder / step_folder(30) / MANIFEST).read_text()
    (folder / step_folder(30) / MANIFEST).write_text(text.replace('"lr":1e-05', '"lr":2e-05'))
    (folder / partial_folder(60, "0a")).mkdir()
    (folder / partial_folder(15, "0b")).mkdir()
    found, skipped = find_newest(folder)
    assert found is not None and found.path.name == step_folder(20)
    reasons = {reason.path.name: reason.reason for reason in skipped}
    assert list(reasons) == [step_folder(50), step_folder(40), step_folder(30), partial_folder(60, "0a")]
    assert "manifest.json: is missing" in reasons[step_folder(50)]
    assert str(file) in reasons[step_folder(40)] and "were saved" in reasons[step_folder(40)]
    assert "was changed since it was saved" in reasons[step_folder(30)]
    assert "was never completed" in reasons[partial_folder(60, "0a")]


def test_a_folder_of_another_step_s_name_is_not_taken(folder: Path) -> None:
    (folder / step_folder(50)).rename(folder / step_folder(99))
    assert newest(folder) == (40, [step_folder(99)])


def test_what_is_checked_can_be_chosen(folder: Path) -> None:
    def refuse(path: Path, manifest: Manifest) -> None:
        if manifest.step > 30:
            raise CheckpointError(f"{path}: not here")

    found, skipped = find_newest(folder, check=refuse)
    assert found is not None and found.manifest.step == 30 and len(skipped) == 2


def write_partial(folder: Path, step: int) -> tuple[Path, Manifest]:
    partial = make_partial(folder, step)
    return partial, make_manifest(step, write_files(partial, TENSORS, seed=1), TENSORS)


def test_a_complete_checkpoint_is_never_replaced(folder: Path) -> None:
    before = (folder / step_folder(50) / MANIFEST).read_bytes()
    partial, manifest = write_partial(folder, 50)
    with pytest.raises(CheckpointError, match="there is a complete checkpoint of this step already"):
        commit(partial, manifest)
    assert (folder / step_folder(50) / MANIFEST).read_bytes() == before
    assert remove_partials(folder) == [partial.name] and newest(folder) == (50, [])


def test_a_damaged_one_makes_room_and_is_kept(folder: Path) -> None:
    next((folder / step_folder(50)).glob("model/*")).unlink()
    partial, manifest = write_partial(folder, 50)
    assert commit(partial, manifest) == folder / step_folder(50)
    assert newest(folder) == (50, []) and read_manifest(folder / step_folder(50)) == manifest
    (aside,) = folder.glob("step-00000050.replaced-*")
    assert read_manifest(aside).step == 50
    assert remove_partials(folder) == [] and aside.is_dir()


def test_old_ones_are_deleted(folder: Path) -> None:
    assert prune(folder, keep_latest=5) == []
    assert prune(folder, keep_latest=4) == [folder / step_folder(10)]
    keep = [folder / step_folder(30)]
    assert prune(folder, keep_latest=1, keep_every=20, keep=keep) == []
    assert prune(folder, keep_latest=1, keep_every=40, keep=keep) == [folder / step_folder(20)]
    assert steps_of(folder) == [50, 40, 30]
    with pytest.raises(ValueError, match="at least one"):
        prune(folder, keep_latest=0)


def test_only_complete_ones_count_as_kept(folder: Path) -> None:
    for step in (50, 40):
        (folder / step_folder(step) / MANIFEST).unlink()
    assert prune(folder, keep_latest=2) == [folder / step_folder(10)]
    assert steps_of(folder) == [50, 40, 30, 20]


def test_a_deletion_that_is_broken_off_leaves_nothing_that_looks_complete(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folders.shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        prune(folder, keep_latest=1)
    monkeypatch.undo()
    assert steps_of(folder) == [50, 40, 30, 20]
    assert [name.partition(".removed-")[0] for name in remove_partials(folder)] == [step_folder(10)]
    assert newest(folder) == (50, [])


def test_where_nodes_share_no_disk_what_is_here_counts(folder: Path) -> None:
    newest_step = steps_of(folder)[0]
    for path in list_steps(folder):
        file = read_manifest(path).files[0].file
        (path / file).unlink()  # Another node has it.
    check = folders.check_files_here
    partial, manifest = write_partial(folder, newest_step)
    with pytest.raises(CheckpointError, match="complete checkpoint of this step"):
        commit(partial, manifest, check=check)
    assert not prune(folder, keep_latest=1)
    assert len(prune(folder, keep_latest=1, check=check)) == 4
    assert steps_of(folder) == [newest_step]
    for record in manifest.files[1:]:
        (folder / step_folder(newest_step) / record.file).unlink()
    assert find_newest(folder, check=check)[0] is None
