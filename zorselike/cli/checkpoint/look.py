"""`zorselike checkpoint ls`, `verify`, `show` and `diff`: they write nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated

import tyro

from zorselike.checkpoint.diff import diff
from zorselike.checkpoint.folder import (
    NEVER_COMPLETED,
    Checkpoint,
    examine,
    list_leftovers,
    list_models,
    list_steps,
)
from zorselike.checkpoint.manifest import Manifest
from zorselike.checkpoint.read import hint_elsewhere, read_manifest
from zorselike.checkpoint.verify import verify
from zorselike.cli.checkpoint.paths import CheckpointPath, find_checkpoint, find_newest_of, show_bytes_done
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import VALUE
from zorselike.text.layout import align_columns
from zorselike.text.wording import count, show_bytes

_STATES = {
    "partial": NEVER_COMPLETED,
    "removed": "was being deleted",
    "replaced": "was set aside, not being complete; nothing reads it, and it may be deleted",
}
"""Of folders beside checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List the checkpoints in a folder, newest first, and which of them are complete."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder of checkpoints."""

    def run(self) -> None:
        print(list_folder(Path(self.folder)))


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check every byte of a checkpoint against its checksums. Exit code 1 if something is wrong."""

    path: CheckpointPath
    """A step's folder; of a folder of checkpoints the newest complete one."""

    def run(self) -> int | None:
        root, incomplete = find_newest_of(self.path)
        try:
            num_bytes = read_manifest(root).num_bytes
        except CheckpointError:
            num_bytes = 0  # Which is the first thing that `verify` says.
        with show_bytes_done(f"verify {root.name}", num_bytes) as progress:
            faults = verify(root, progress=progress)
        for fault in faults:
            print(fault)
        if faults:
            print(f"{root}: {count(len(faults), 'fault')}")
            return 1
        print(f"{root}: {show_bytes(num_bytes)} are as they were saved")
        if incomplete:
            print(f"{count(len(incomplete), 'newer checkpoint')} passed over, see above")
            return 1
        return None


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show what a checkpoint holds."""

    path: CheckpointPath
    """A step's folder; of a folder of checkpoints the newest complete one."""

    tensors: bool = False
    """Also list every tensor."""

    plan: bool = False
    """Print the plan that it was saved under, as TOML, and nothing else."""

    def run(self) -> None:
        root = find_checkpoint(self.path)
        manifest = read_manifest(root)
        if self.plan:
            if manifest.plan is None:
                raise CheckpointError(f"{root}: holds no plan")
            print(manifest.plan, end="")
            return
        print(f"{root}\n" + "\n".join(describe(manifest)))
        if self.tensors:
            print("\n" + "\n".join(list_tensors(manifest)))


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Compare two checkpoints, whatever plans they were saved under. Exit code 1 if they differ."""

    a: CheckpointPath
    """A step's folder; of a folder of checkpoints the newest complete one."""

    b: CheckpointPath
    """The other one."""

    def run(self) -> int | None:
        a, b = find_checkpoint(self.a), find_checkpoint(self.b)
        with show_bytes_done("compare", read_manifest(a).num_bytes) as progress:
            found = diff(a, b, progress=progress)
        for one in found:
            print(f"{one.name}: {one.what}")
        if not found:
            print("no differences")
        return 1 if found else None


def list_folder(folder: Path) -> str:
    """A table of what there is; raises `CheckpointError` where nothing is."""
    table = [("step", "saved", "size", "files", "state")]
    for path in list_steps(folder):
        found = examine(path)
        if isinstance(found, Checkpoint):
            manifest = found.manifest
            state = "complete" if manifest.optimizer is not None else "complete, model only"
            size = show_bytes(manifest.num_bytes)
            table.append((path.name, manifest.saved_at, size, str(len(manifest.files)), state))
        else:
            table.append((path.name, "", "", "", found.reason.removeprefix(f"{path}").lstrip("/: ")))
    for path in list_models(folder):
        files = [file for file in path.iterdir() if file.is_file()]
        size = show_bytes(sum(file.stat().st_size for file in files))
        table.append((path.name, "", size, str(len(files)), "the model alone, handed on"))
    for kind, state in _STATES.items():
        table += [(path.name, "", "", "", state) for _, path in list_leftovers(folder, kind)]
    if len(table) == 1:
        why = f"holds no checkpoints{hint_elsewhere(folder)}" if folder.exists() else "is not there"
        raise CheckpointError(f"{folder}: {why}")
    return "\n".join(align_columns(table, left=(0, 1, 4)))


def describe(manifest: Manifest) -> Iterator[str]:
    trained = [tensor for tensor in manifest.tensors.values() if tensor.trains]
    num_elements = sum(prod(tensor.shape) for tensor in manifest.tensors.values())
    sizes: Counter[str] = Counter()
    for file in manifest.files:
        for record in file.slices:
            sizes[record.box.kind] += record.num_bytes
    yield f"step           {manifest.step}, {manifest.rows_seen} rows seen, seed {manifest.seed}"
    yield f"saved          {manifest.saved_at}"
    yield f"by             {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}"
    yield f"size           {show_bytes(manifest.num_bytes)} in {count(len(manifest.files), 'file')}"
    yield (
        f"model          {count(len(manifest.tensors), 'tensor')} of {num_elements:,} elements, "
        f"{len(trained)} of them trained; {show_bytes(sizes.pop(VALUE, 0))}"
    )
    if manifest.base is not None:
        yield f"beside         {manifest.base.folder}, whose weights are read from there"
    for name, original in sorted(manifest.aliases.items()):
        yield f"tied           {name} is {original}"
    if manifest.optimizer is None:
        yield "optimizer      none: the model alone was saved"
    else:
        yield f"optimizer      {manifest.optimizer.get('class', 'unknown')}"
        for kind, num_bytes in sizes.items():
            yield f"  {kind}: {show_bytes(num_bytes)}"
        options = manifest.optimizer.get("options", ())
        for own in options if isinstance(options, list) else ():
            yield f"  options: {json.dumps(own)}"
    if manifest.loss_scale is not None:
        yield f"loss_scale     {json.dumps(manifest.loss_scale)}"
    if manifest.schedule is not None:  # By parameter it is long; `manifest.json` has it.
        yield f"schedule       {json.dumps(manifest.schedule.get('common'))}"
    yield f"plan           {'none' if manifest.plan is None else 'printed by --plan'}"
    for name, value in manifest.extra.items():
        yield f"extra          {name}: {json.dumps(value)}"


def list_tensors(manifest: Manifest) -> list[str]:
    table = [("tensor", "shape", "saved", "model", "", "slices", "states")]
    for name, tensor in manifest.tensors.items():
        shape = " x ".join(map(str, tensor.shape)) or "number"
        states = ", ".join(kind for kind in manifest.kinds_of(name) if kind != VALUE)
        num_slices = len(manifest.slices_of(name, VALUE))
        trains = "" if tensor.trains else "frozen"
        table.append((name, shape, tensor.dtype, tensor.model_dtype, trains, str(num_slices), states))
    return align_columns(table, left=(0, 2, 3, 4, 6))
