"""Makes a checkpoint of one that torch.distributed.checkpoint (DCP) wrote, such as TorchTitan's.

    python tools/convert_checkpoint.py outputs/checkpoint/step-1000 checkpoints --trust-pickle
    python tools/convert_checkpoint.py outputs/checkpoint/step-1000 checkpoints --trust-pickle --model-only

The metadata of DCP is a pickle, and so are the options of the optimizer: whoever wrote them decides what runs
here when they are read. Therefore nothing is read without --trust-pickle; give it for checkpoints of people
that you trust, made and kept where nobody else writes. What comes out holds no pickle.

Weights are taken under their names in the model, at the top (TorchTitan) or under `model`; moments, counters
and options under `optimizer` or `optim`, flattened by parameter names (TorchTitan) or not. Names and shapes
must be those of the model that is to be trained. Learning-rate schedules and data loaders are not taken over.
One tensor at a time is in memory. Safetensors of whole tensors come in by `zorselike checkpoint import`.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.report import make_parser, write_json
from zorselike.checkpoint.folder import commit, make_partial
from zorselike.checkpoint.layout import slices_file
from zorselike.checkpoint.lease import Lease
from zorselike.checkpoint.manifest import FileRecord, Manifest, TensorRecord
from zorselike.checkpoint.slices import Slice, SlicesWriter
from zorselike.errors import CheckpointError, ConfigError
from zorselike.plan.holdings import VALUE, Box
from zorselike.runtime.ministage.named_state import OptimizerFacts
from zorselike.runtime.state.dtypes import bytes_of, dtype_name
from zorselike.runtime.state.save import describe_optimizers
from zorselike.text.wording import first_line, list_few
from zorselike.version import __version__

OPTIMIZERS = ("optimizer", "optim")
NOT_TAKEN = ("lr_scheduler", "dataloader", "train_state")
"""What TorchTitan keeps beside model and optimizer."""
OF_THE_MACHINE = ("params", "foreach", "fused", "capturable", "differentiable")
"""Entries of an optimizer's group that say nothing of the training."""


class DCPReader(FileSystemReader):
    """Reads the metadata once."""

    def __init__(self, root: Path) -> None:
        """Raises `CheckpointError` where there is none."""
        super().__init__(root)
        self._root = root
        with _one_line(f"{root}: its metadata"):
            self._metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def load(self, keys: Collection[str]) -> dict[str, Any]:
        """Whole tensors and other values."""
        state: dict[str, Any] = {}
        for key in keys:
            known = self._metadata.state_dict_metadata[key]
            if isinstance(known, TensorStorageMetadata):
                state[key] = torch.empty(known.size, dtype=known.properties.dtype)
            else:
                state[key] = None
        with _one_line(f"{self._root}: {list_few(list(keys))}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That there is no process group.
            load(state, storage_reader=self, no_dist=True)
        return state


@dataclass
class Found:
    """Keys in the metadata, by what they are."""

    model: dict[str, str] = field(default_factory=dict)
    """By name."""
    moments: dict[tuple[str, str], str] = field(default_factory=dict)
    """By name and state."""
    numbers: dict[tuple[str, str], str] = field(default_factory=dict)
    """The same, of those that are one number."""
    options: dict[tuple[str, ...], str] = field(default_factory=dict)
    """By their path below `param_groups`."""
    step: str | None = None
    left: list[str] = field(default_factory=list)


def sort_keys(metadata: Metadata, *, leave_out: Collection[str] = ()) -> Found:
    """Finds out what is what, by the paths that DCP flattened.

    Raises:
        CheckpointError: There is no model, or something of the optimizer is of a parameter that it lacks.
    """
    found = Found()
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    for key, known in metadata.state_dict_metadata.items():
        path = tuple(map(str, paths.get(key, (key,))))
        shape = tuple(known.size) if isinstance(known, TensorStorageMetadata) else None
        inside = ".".join(path[1:])
        if path[0] in OPTIMIZERS and inside.startswith("state."):
            name, _, state = inside.removeprefix("state.").rpartition(".")
            (found.moments if shape else found.numbers)[name, state] = key
        elif path[0] in OPTIMIZERS and inside.startswith("param_groups."):
            found.options[tuple(inside.removeprefix("param_groups.").split("."))] = key
        elif path == ("train_state", "step"):
            found.step = key
        elif path[0] in NOT_TAKEN or path[0] in OPTIMIZERS or shape is None:
            found.left.append(key)
        else:
            name = inside if path[0] == "model" and inside else ".".join(path)
            if name in leave_out:
                found.left.append(key)
            else:
                found.model[name] = key
    if not found.model:
        raise CheckpointError("the checkpoint holds no tensors of a model")
    strange = sorted({name for name, _ in (*found.moments, *found.numbers)} - set(found.model))
    if strange:
        raise CheckpointError(
            f"the optimizer has state of {list_few(strange)}, which are no names of the model: convert with "
            "--model-only"
        )
    return found


def convert(
    source: Path,
    folder: Path,
    *,
    model_only: bool = False,
    rows_seen: int = 0,
    leave_out: Collection[str] = (),
) -> tuple[Path, list[str]]:
    """Reads pickles of `source`. Returns the new checkpoint's path, and the keys that were not taken over.

    Args:
        source: a folder with `.metadata`.
        folder: of our checkpoints.
        model_only: leave out the optimizer.
        rows_seen: rows trained on until then: where data goes on.
        leave_out: names of the model's tensors that are not wanted.

    Raises:
        CheckpointError: One line that says what is wrong with the source.
        OSError: The folder cannot be written.
    """
    reader = DCPReader(source)
    metadata = reader.read_metadata()
    try:
        found = sort_keys(metadata, leave_out=leave_out)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    if model_only:
        found.moments.clear()
        found.numbers.clear()
        found.options.clear()
    optimizer = _read_optimizer(reader, found) if found.moments or found.numbers else None
    trained = {name for name, _ in (*found.moments, *found.numbers)} or set(found.model)
    sources = {(name, VALUE): key for name, key in found.model.items()} | found.moments
    slices = {}
    for (name, kind), key in sources.items():
        known = metadata.state_dict_metadata[key]
        assert isinstance(known, TensorStorageMetadata), "others are no values and no moments"
        shape = tuple(known.size)
        slices[name, kind] = Slice(Box.whole(name, kind, shape), dtype_name(known.properties.dtype), shape)
    lease = Lease(folder)
    try:
        partial = make_partial(folder, _find_step(reader, found, optimizer))
        try:
            files = []
            for part in ("model", "optim"):
                own = {s: k for s, k in sources.items() if (s[1] == VALUE) is (part == "model")}
                if own:
                    described = [slices[entry] for entry in own]
                    files.append(_write(reader, partial, part, described, list(own.values())))
            manifest = Manifest(
                step=_find_step(reader, found, optimizer),
                rows_seen=rows_seen,
                seed=0,
                tensors={
                    name: TensorRecord(one.shape, one.dtype, one.dtype, name in trained)
                    for (name, kind), one in slices.items()
                    if kind == VALUE
                },
                files=tuple(files),
                aliases={},
                optimizer=None if optimizer is None else describe_optimizers([optimizer]),
                loss_scale=None,
                schedule=None,
                plan=None,
                extra={"converted_from": str(source)},
                versions={
                    "zorselike": __version__,
                    "torch": str(torch.__version__),
                    "python": platform.python_version(),
                },
                saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            return commit(partial, manifest), found.left
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        lease.release()


def _write(
    reader: DCPReader,
    partial: Path,
    part: Literal["model", "optim"],
    slices: Sequence[Slice],
    keys: Sequence[str],
) -> FileRecord:
    writer = SlicesWriter(partial, slices_file(part, 0), slices)
    try:
        for key in keys:
            tensor = reader.load([key])[key]
            writer.write(bytes_of(tensor))
        return writer.finish()
    finally:
        writer.abort()


def _read_optimizer(reader: DCPReader, found: Found) -> OptimizerFacts:
    values = reader.load([*found.numbers.values(), *found.options.values()])
    numbers: dict[str, dict[str, Any]] = {name: {} for name, _ in found.moments}
    for (name, state), key in found.numbers.items():
        numbers.setdefault(name, {})[state] = _to_plain(values[key], key)
    options: dict[str, dict[str, Any]] = {}
    members = {path[0]: values[key] for path, key in found.options.items() if path[1:] == ("params",)}
    for path, key in found.options.items():
        names = members.get(path[0], [".".join(path[:-1])])
        if path[-1] not in OF_THE_MACHINE:
            for name in names:
                options.setdefault(name, {})[path[-1]] = _to_plain(values[key], key)
    # Which class it was is said nowhere.
    return OptimizerFacts("", {name: options.get(name, {}) for name in numbers}, numbers)


def _find_step(reader: DCPReader, found: Found, optimizer: OptimizerFacts | None) -> int:
    """What the training says, else what the optimizer has counted."""
    if found.step is not None:
        return int(reader.load([found.step])[found.step])
    counted = [own["step"] for own in optimizer.numbers.values() if "step" in own] if optimizer else []
    return max((int(own["value"] if isinstance(own, dict) else own) for own in counted), default=0)


def _to_plain(value: Any, key: str) -> Any:
    """As a manifest has it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": str(value.dtype).removeprefix("torch."), "value": value.item()}
    if isinstance(value, list | tuple):
        return [_to_plain(entry, key) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"{key} is a {type(value).__name__}, which a checkpoint cannot hold: convert with --model-only"
    )


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """What cannot be read is one `CheckpointError`, whatever torch or pickle raise."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what} cannot be read: {first_line(error)}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts one checkpoint; the exit status is 0 if it is there."""
    parser = make_parser(__doc__)
    parser.add_argument("source", type=Path, help="a folder that DCP wrote, with its .metadata")
    parser.add_argument("folder", type=Path, help="of checkpoints, where the new one is to be")
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read the source's pickles, which can run any code of whoever wrote them",
    )
    parser.add_argument("--model-only", action="store_true", help="leave out the optimizer")
    parser.add_argument(
        "--rows-seen",
        type=int,
        default=0,
        metavar="N",
        help="rows trained on so far (steps times global batch), where the data goes on; DCP does not say it",
    )
    parser.add_argument(
        "--leave-out", nargs="+", default=(), metavar="NAME", help="tensors that the model here lacks"
    )
    options = parser.parse_args(arguments)
    if not options.trust_pickle:
        print(
            f"{options.source}: the metadata of DCP is a pickle, and reading it can run any code of whoever "
            "wrote it; if you trust them, add --trust-pickle",
            file=sys.stderr,
        )
        return 2
    try:
        path, left = convert(
            options.source,
            options.folder,
            model_only=options.model_only,
            rows_seen=options.rows_seen,
            leave_out=options.leave_out,
        )
    except (CheckpointError, ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path}" + (f"; not taken over: {list_few(left)}" if left else ""))
    write_json(options.json, {"path": path, "not_taken_over": left})
    return 0


if __name__ == "__main__":
    sys.exit(main())
