"""Pickles that do something when they are loaded, under every name that a loader might open."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from zorselike.checkpoint.diff import diff
from zorselike.checkpoint.export import export
from zorselike.checkpoint.folder import find_newest
from zorselike.checkpoint.imported import import_files
from zorselike.checkpoint.layout import LEASE, MANIFEST
from zorselike.checkpoint.lease import Lease
from zorselike.checkpoint.read import read_manifest
from zorselike.checkpoint.verify import verify
from zorselike.errors import CheckpointError

from .subject import OLD, OLDEST, Share, Subject, Tally, copies_of, make_base

_BESIDE = (
    ".metadata",
    "model/.metadata",
    "optim/.metadata",
    "model.pt",
    "model/rank-00000.pt",
    "optim/rank-00000.pt",
    "model/rank-00000.safetensors.pt",
    "__0_0.distcp",
    "pytorch_model.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "training_args.bin",
    "manifest.pkl",
    "manifest.json.pkl",
    "manifest.json.tmp",
    "extra.pkl",
    "data.npy",
    "__init__.py",
)
"""Names that frameworks load, and likely ones of our own."""


class _Acts:
    """Makes a folder when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._marker),)


def plant_pickles(subject: Subject, scratch: Path, share: Share) -> Tally:
    """None may be loaded by anything that is done with a folder, and none may be taken for a checkpoint's
    file."""
    tally = Tally("pickles")
    base = make_base(subject, scratch / "base")
    marker = scratch / "loaded"
    plain = pickle.dumps(_Acts(marker))
    forms = {"pickle": plain, "torch's archive": _zip(plain)}
    root = base / f"step-{OLD:08}"
    files = [MANIFEST, *(file.file for file in read_manifest(root).files)]
    pickle.loads(plain)
    if not marker.is_dir():
        tally.add("the pickle itself", "does nothing")
        return tally
    marker.rmdir()
    copies = copies_of(base, scratch)
    names = [f"step-{OLD:08}/{name}" for name in (*_BESIDE, *files)]
    names += [LEASE, ".metadata", "latest.pt", "step-00000099.pt", f"step-{OLD + 1:08}/.metadata"]
    cases = [(name, form) for name in names for form in forms]
    for name, form in share.of(cases):
        folder = next(copies)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(forms[form])
        is_needed = name.removeprefix(f"{root.name}/") in files
        fault = _use(subject, folder, scratch / "out", name, is_needed=is_needed)
        if marker.exists():
            fault = "it was loaded"
            marker.rmdir()
        tally.add(f"{form} as {name}", fault)
    return tally


def _use(subject: Subject, folder: Path, out: Path, name: str, *, is_needed: bool) -> str | None:
    """Everything that is done with checkpoints."""
    newest, skipped = find_newest(folder)
    if newest is None or newest.manifest.step != (OLDEST if is_needed else OLD) or subject.find_fault(newest):
        return "another checkpoint is found"
    if is_needed and str(folder / name) not in skipped[0].reason:
        return f"what is passed over is {skipped}"
    root = folder / f"step-{OLD:08}"
    inside = name.removeprefix(f"{root.name}/")
    if inside != name and inside not in {fault.file for fault in verify(root)}:
        return "verify does not name it"
    for work in (
        lambda: export(root, out / "exported"),
        lambda: diff(root, newest.path),
        lambda: import_files([folder / name], out / "imported"),
        lambda: import_files([root / "model"], out / "imported"),
        lambda: Lease(folder).release(),
    ):
        try:
            work()
        except CheckpointError:
            continue
        except Exception as error:
            return f"{error!r}"
    shutil.rmtree(out, ignore_errors=True)
    return None


def _zip(content: bytes) -> bytes:
    """As `torch.save` writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()
