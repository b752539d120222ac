"""A folder of checkpoints: how one comes to be whole or not at all, which there are, which may go.

A checkpoint is written into a folder that nothing reads; when all files are on the disk and the manifest
too, that folder is renamed. What a writer that dies leaves behind is therefore never taken for a
checkpoint.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from zorselike.checkpoint.coverage import refuse_gaps
from zorselike.checkpoint.layout import (
    LEASE,
    MANIFEST,
    is_model_folder,
    leftover_of,
    partial_folder,
    step_folder,
    step_of,
)
from zorselike.checkpoint.manifest import Manifest
from zorselike.checkpoint.read import SlicesReader, hint_elsewhere, read_manifest
from zorselike.checkpoint.slices import make_folders, sync_folder, write_file
from zorselike.errors import CheckpointError

NEVER_COMPLETED = "was never completed: its writer died, or is still writing"

Check = Callable[[Path, Manifest], None]
"""Raises `CheckpointError` if a step's folder does not hold what its manifest says."""


@dataclass(frozen=True)
class Checkpoint:
    """One step's folder that is complete."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Skipped:
    """What looks like a checkpoint and is none."""

    path: Path
    reason: str


def check_all_files(path: Path, manifest: Manifest) -> None:
    """Raises `CheckpointError` unless all files are there with the sizes and headers that were saved."""
    reader = SlicesReader(path, manifest)
    try:
        reader.check_files()
    finally:
        reader.close()


def check_files_here(path: Path, manifest: Manifest) -> None:
    """The same of those files that are on this disk, where nodes do not share theirs: at least one is."""
    reader = SlicesReader(path, manifest)
    try:
        here = [record.file for record in manifest.files if reader.sees(record.file)]
        if not here:
            raise CheckpointError(f"{path}: none of its files is here")
        reader.check_files(here)
    finally:
        reader.close()


# -- writing one -----------------------------------------------------------------------------


def make_partial(folder: Path, step: int) -> Path:
    """A new empty folder to write a step's checkpoint into; makes the folder of checkpoints too."""
    make_folders(folder)
    partial = folder / partial_folder(step, _token())
    os.mkdir(partial)  # noqa: PTH102
    return partial


def commit(partial: Path, manifest: Manifest, *, check: Check = check_all_files) -> Path:
    """Makes a written folder the checkpoint of its step; returns its new path.

    Until the folder is renamed there is no checkpoint, from then on there is one, whatever happens. One of
    the same step that is not complete, as `check` says, is moved aside and kept.

    Raises:
        CheckpointError: There is a complete one of that step; or the manifest contradicts itself, lacks a
            part of a tensor or holds what is not JSON.
        OSError: Something cannot be written.
    """
    target = partial.parent / step_folder(manifest.step)
    refuse_gaps(manifest)
    text = manifest.to_text().encode()
    write_file(partial / MANIFEST, text)
    sync_folder(partial)  # Those inside it were synced by who wrote there.
    if target.exists():
        if isinstance(examine(target, check), Checkpoint):
            raise CheckpointError(
                f"{target}: there is a complete checkpoint of this step already; save into another folder, "
                "or move it away"
            )
        set_aside(target)
    os.rename(partial, target)  # noqa: PTH104
    sync_folder(partial.parent)
    return target


def set_aside(path: Path) -> Path:
    """Renames a step's folder so that it is no checkpoint any more; nothing deletes it. Returns its new
    path."""
    aside = path.with_name(f"{path.name}.replaced-{_token()}")
    os.rename(path, aside)  # noqa: PTH104
    return aside


# -- finding ---------------------------------------------------------------------------------


def list_steps(folder: Path) -> list[Path]:
    """The folders of checkpoints that were committed, newest first; none if there is no such folder."""
    steps = [(step, path) for path in _list(folder) if (step := step_of(path.name)) is not None]
    return [path for _, path in sorted(steps, reverse=True)]


def find_newest(
    folder: Path, *, check: Check = check_all_files
) -> tuple[Checkpoint | None, tuple[Skipped, ...]]:
    """The newest checkpoint that is complete, and what is newer and is not, with the reasons.

    Args:
        folder: of checkpoints; nothing is found where there is none.
        check: decides of one whose manifest is good.
    """
    skipped = []
    found = None
    for path in list_steps(folder):
        examined = examine(path, check)
        if isinstance(examined, Checkpoint):
            found = examined
            break
        skipped.append(examined)
    for step, path in list_leftovers(folder, "partial"):
        if found is None or step > found.manifest.step:
            skipped.append(Skipped(path, f"{path}: {NEVER_COMPLETED}"))
    return found, tuple(skipped)


def list_leftovers(folder: Path, *kinds: str) -> list[tuple[int, Path]]:
    """Steps and folders that are beside committed ones, of kinds of `layout.leftover_of`."""
    found = [(leftover_of(path.name), path) for path in _list(folder)]
    return [(own[0], path) for own, path in found if own is not None and own[1] in kinds]


def list_models(folder: Path) -> list[Path]:
    """Models that runs have handed on, newest first."""
    return [path for path in reversed(_list(folder)) if is_model_folder(path.name)]


def locate(path: Path) -> tuple[Path, tuple[Skipped, ...]]:
    """A step's folder for itself, the newest complete one for a folder of checkpoints; and what was passed
    over.

    Raises:
        CheckpointError: There is none.
    """
    if (path / MANIFEST).exists() or (step_of(path.name) is not None and path.is_dir()):
        return path, ()
    found, skipped = find_newest(path)
    if found is None:
        if not path.exists():
            raise CheckpointError(f"{path}: there is no such folder")
        why = "; ".join(one.reason for one in skipped)
        raise CheckpointError(
            f"{path}: holds no complete checkpoint{': ' if why else ''}{why or hint_elsewhere(path)}"
        )
    return found.path, skipped


def examine(path: Path, check: Check = check_all_files) -> Checkpoint | Skipped:
    """What a step's folder is, or what is wrong with it."""
    try:
        manifest = read_manifest(path)
        if path.name != step_folder(manifest.step):
            raise CheckpointError(f"{path / MANIFEST}: is of step {manifest.step}")
        check(path, manifest)
    except CheckpointError as error:
        return Skipped(path, str(error))
    return Checkpoint(path, manifest)


def _list(folder: Path) -> list[Path]:
    """Folders in a folder."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from None


# -- deleting --------------------------------------------------------------------------------


def prune(
    folder: Path,
    *,
    keep_latest: int,
    keep_every: int | None = None,
    keep: Collection[Path] = (),
    check: Check = check_all_files,
) -> list[Path]:
    """Deletes old checkpoints, oldest first; returns which.

    Args:
        folder: of checkpoints; this process holds its lease.
        keep_latest: how many complete ones are kept, 1 or more. What is not complete does not count, and
            is deleted when so many newer ones are.
        keep_every: steps that are multiples of it are kept.
        keep: others that are kept.
        check: as in `find_newest`.
    """
    if keep_latest < 1:
        raise ValueError(f"keep_latest is {keep_latest}; at least one checkpoint is kept")
    kept = {path.name for path in keep}
    num_complete = 0
    removable = []
    for path in list_steps(folder):
        if num_complete < keep_latest:
            num_complete += isinstance(examine(path, check), Checkpoint)
        elif path.name not in kept and not (keep_every and (step_of(path.name) or 0) % keep_every == 0):
            removable.append(path)
    removable.reverse()
    for path in removable:
        remove_step(path)
    return removable


def remove_step(path: Path) -> None:
    """Deletes a step's folder.

    Raises:
        ValueError: It has another name: nothing else is ever deleted.
    """
    if step_of(path.name) is None:
        raise ValueError(f"{path} is no folder of a step")
    # What is half deleted must not look like a checkpoint.
    removed = path.with_name(f"{path.name}.removed-{_token()}")
    os.rename(path, removed)  # noqa: PTH104
    sync_folder(path.parent)
    shutil.rmtree(removed)


def remove_partial(path: Path) -> None:
    """Deletes a folder that `make_partial` made and nobody completed, as far as that can be done.

    Raises:
        ValueError: It has another name: nothing else is ever deleted.
    """
    if leftover_of(path.name) is None:
        raise ValueError(f"{path} is no folder of an unfinished checkpoint")
    shutil.rmtree(path, ignore_errors=True)


def remove_partials(folder: Path) -> list[str]:
    """Deletes what writers that died left in a folder whose lease this process holds; returns the names."""
    leftovers = [path for _, path in list_leftovers(folder, "partial", "removed")]
    for path in leftovers:
        shutil.rmtree(path)
    for path in folder.glob(f"{LEASE}.*"):  # Of a process that died while it took the lease.
        path.unlink(missing_ok=True)
    return [path.name for path in leftovers]


def _token() -> str:
    return uuid.uuid4().hex[:8]
