"""Whose checkpoints are tortured, and how cases are counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from checkpoint_files import load, make_manifest, make_tensors, write_files

from zorselike.checkpoint.folder import (
    Checkpoint,
    Skipped,
    commit,
    examine,
    find_newest,
    list_steps,
    make_partial,
    prune,
    remove_partials,
)
from zorselike.checkpoint.lease import Lease
from zorselike.checkpoint.verify import verify

T = TypeVar("T")
OnCommit = Callable[[], None]

OLDEST, OLD, NEW, NEXT = 10, 20, 30, 40
"""Steps: two are there already, the writer that is disturbed saves the third, its successor the fourth."""
KEEP_LATEST = 2


def ignore() -> None:
    """Nothing is done at the commit."""


class Subject(Protocol):
    """Something that saves and loads."""

    def save(self, folder: Path, step: int, on_commit: OnCommit = ignore) -> None:
        """All that a job does to save one step, deleting of old ones included; raises if it fails. From
        `on_commit` on the checkpoint must be there."""

    def find_fault(self, checkpoint: Checkpoint) -> str | None:
        """What of a checkpoint is not as it was saved when it is loaded."""


class FileLayer:
    """Numpy arrays, written as the files of two ranks."""

    def save(self, folder: Path, step: int, on_commit: OnCommit = ignore) -> None:
        lease = Lease(folder)
        try:
            remove_partials(folder)
            partial = make_partial(folder, step)
            try:
                tensors = make_tensors(step)
                files = write_files(partial, tensors, num_ranks=2, seed=step)
                lease.check()
                commit(partial, make_manifest(step, files, tensors))
                on_commit()
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            prune(folder, keep_latest=KEEP_LATEST)
        finally:
            lease.release()

    def find_fault(self, checkpoint: Checkpoint) -> str | None:
        expected = make_tensors(checkpoint.manifest.step)
        found = load(checkpoint.path, checkpoint.manifest, expected)
        for key, array in expected.items():
            if not np.array_equal(found[key], array):
                return f"{checkpoint.path}: {key} is not what was saved"
        return None


@dataclass(frozen=True)
class Share:
    """Of all cases every so many, beginning with one of them."""

    first: int = 0
    every: int = 1

    def of(self, cases: Sequence[T]) -> Sequence[T]:
        return cases[self.first % self.every :: self.every]


@dataclass
class Tally:
    """Cases of one kind, and what was wrong in those that were lost."""

    name: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)

    def add(self, case: object, fault: str | None) -> None:
        self.tried += 1
        if fault is not None:
            self.lost.append(f"{case}: {fault}")

    @property
    def found(self) -> int:
        return self.tried - len(self.lost)


def make_base(subject: Subject, folder: Path) -> Path:
    """A folder with two checkpoints."""
    for step in (OLDEST, OLD):
        subject.save(folder, step)
    return folder


def copies_of(base: Path, scratch: Path) -> Iterator[Path]:
    """Fresh copies of a folder without end, one at a time."""
    copy = scratch / "copy"
    while True:
        shutil.rmtree(copy, ignore_errors=True)
        yield Path(shutil.copytree(base, copy))


def find_fault_after(subject: Subject, folder: Path, *, may_be_new: bool = True) -> str | None:
    """What is wrong with a folder after a save of `NEW` was disturbed: the newest complete checkpoint must be
    found and be as it was saved, what else is there must be named, and the next save must succeed."""
    newest, skipped = find_newest(folder)
    fault = _judge(subject, folder, newest, skipped, may_be_new=may_be_new)
    if fault is not None:
        return fault
    try:
        subject.save(folder, NEXT)
    except Exception as error:
        return f"the next save failed: {error}"
    newest, skipped = find_newest(folder)
    if newest is None or newest.manifest.step != NEXT or skipped or subject.find_fault(newest):
        return "the next save is not found"
    left = [path.name for path in folder.iterdir() if "." in path.name and ".replaced-" not in path.name]
    return f"{left} is left after the next save" if left else None


def _judge(
    subject: Subject, folder: Path, newest: Checkpoint | None, skipped: Sequence[Skipped], *, may_be_new: bool
) -> str | None:
    if newest is None:
        return "no checkpoint is left"
    if newest.manifest.step not in ((OLD, NEW) if may_be_new else (OLD,)):
        return f"step {newest.manifest.step} is found"
    if verify(newest.path) or subject.find_fault(newest):
        return f"step {newest.manifest.step} is damaged"
    unnamed = set(folder.glob("step-*.partial-*")) - {one.path for one in skipped}
    if unnamed and newest.manifest.step == OLD:
        return f"{unnamed} is not named"
    if any(str(one.path) not in one.reason for one in skipped):
        return "a reason does not name its path"
    if skipped and skipped[0].path.name == f"step-{NEW:08}":
        return "what was committed is not found"
    broken = [path.name for path in list_steps(folder) if not isinstance(examine(path), Checkpoint)]
    if broken:
        return f"{broken} is there in part"
    return None
