"""Exports a checkpoint's weights as safetensors files of whole tensors, as Hugging Face's libraries lay
them out: `model.safetensors`, or numbered files and an index."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from zorselike.checkpoint.blocks import dtype_of, read_blocks
from zorselike.checkpoint.dtypes import FLOATS, decode, encode
from zorselike.checkpoint.manifest import Manifest
from zorselike.checkpoint.read import SlicesReader, read_manifest
from zorselike.checkpoint.safetensors_file import INDEX, WEIGHTS, may_be, open_folder
from zorselike.checkpoint.slices import Slice, SlicesWriter, make_folders, sync_folder, write_file
from zorselike.checkpoint.verify import OnBytes
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import VALUE, Box, subtract

AS_IN_MODEL = "model"
"""Instead of a dtype: each tensor in the one that the model was given in."""
SHARD_BYTES = 5 * 10**9

Shards = list[list[Slice]]
"""The tensors of each file."""

_CONFIG = "config.json"
_COMPANIONS = frozenset((".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"))
_OTHER_TEMPLATES = "additional_chat_templates"
"""Folder in which `transformers` saves all chat templates but the first."""
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Part:
    """What a file's tensor is of the checkpoint's."""

    box: Box
    shape: tuple[int, ...]
    """In the file, perhaps without the first dimension, of which it is one entry."""


def list_parts(
    manifest: Manifest, like: Path, name_of: Callable[[str], str | Box] = str
) -> dict[str, Part] | None:
    """The checkpoint's tensors by the names that a folder of Hugging Face's libraries has for them, in its
    order; None where it has no weights.

    Args:
        manifest: the checkpoint's.
        like: the folder.
        name_of: what the checkpoint calls what the folder's files call so, or a box of its values.

    Raises:
        CheckpointError: The folder is of another model.
    """
    if not any(like.glob("*.safetensors")):
        return None
    parts: dict[str, Part] = {}
    left = {name: [Box.whole(name, VALUE, tensor.shape)] for name, tensor in manifest.tensors.items()}
    for one in (one for file in open_folder(like) for one in file.slices):
        found = name_of(one.box.name)
        box = Box.whole(found, VALUE, one.shape) if isinstance(found, str) else found
        box = replace(box, name=manifest.aliases.get(box.name, box.name))
        if box.name not in left:  # There may be masks, which no model has.
            continue
        whole = Box.whole(box.name, VALUE, manifest.tensors[box.name].shape)
        if not may_be(one, box, whole):
            raise _of_other_model(like, whole, f"has {one.shape} as {one.box.name}")
        left[box.name] = [rest for own in left[box.name] for rest in subtract(own, box)]
        parts[one.box.name] = Part(box, one.shape)
    for name, rest in left.items():
        whole = Box.whole(name, VALUE, manifest.tensors[name].shape)
        if rest and whole.num_elements:
            what = "has no such weight" if rest == [whole] else "has a part of it alone"
            raise _of_other_model(like, whole, what)
    return parts


def _of_other_model(folder: Path, whole: Box, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: is of another model: {whole.name} is {whole.shape} in the checkpoint, and the folder "
        f"{what}; name the folder of the model that was trained"
    )


def list_shards(
    manifest: Manifest,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    aliases: bool = False,
    parts: Mapping[str, Part] | None = None,
) -> Shards:
    """What is written; see `export`."""
    if parts is None:
        parts = _name_as_in_model(manifest, aliases=aliases)
    shards: Shards = []
    room = 0
    for name, part in parts.items():
        tensor = manifest.tensors[part.box.name]
        wanted = tensor.model_dtype if dtype == AS_IN_MODEL else dtype
        if wanted not in FLOATS or tensor.dtype not in FLOATS:  # Counts and masks stay what they are.
            wanted = tensor.dtype
        one = Slice(Box.whole(name, VALUE, part.shape), wanted, part.shape)
        if not shards or one.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(one)
        room -= one.num_bytes
    return shards or [[]]


def _name_as_in_model(manifest: Manifest, *, aliases: bool) -> dict[str, Part]:
    """Each tensor whole, `aliases`: under each of its names."""
    owners = {name: name for name in manifest.tensors} | (dict(manifest.aliases) if aliases else {})
    shapes = {name: manifest.tensors[owner].shape for name, owner in owners.items()}
    return {name: Part(Box.whole(owners[name], VALUE, shape), shape) for name, shape in shapes.items()}


def export(
    root: Path,
    target: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    aliases: bool = False,
    like: Path | None = None,
    parts: Mapping[str, Part] | None = None,
    progress: OnBytes | None = None,
) -> list[Path]:
    """Writes the weights, every byte read against its checksum, one block of rows at a time; returns the
    files.

    Args:
        root: a step's folder.
        target: folder to make; it is there when all of it is.
        dtype: of floating-point tensors, by its name in safetensors or `AS_IN_MODEL`; None: as saved, which
            for a model in half precision is the fp32 master.
        max_shard_bytes: of a file, unless one tensor alone is larger.
        aliases: whether tied weights are written under each of their names.
        like: a folder of Hugging Face's libraries, of the same model: all that it has beside weights
            (`config.json`, the tokenizer's files) is copied, so that `from_pretrained` takes the target.
        parts: what is written under which name, as `list_parts` has found it in `like`; None: the model's
            own names.
        progress: is told of bytes written.

    Raises:
        CheckpointError: What was saved is incomplete or damaged, there is something at the target, or `like`
            has no `config.json`.
        OSError: The target cannot be written.
    """
    manifest = read_manifest(root)
    if manifest.base is not None:
        raise CheckpointError(f"{root}: holds adapters, without the model of {manifest.base.folder}")
    if like is not None:
        _list_companions(like)
    parts = parts or _name_as_in_model(manifest, aliases=aliases)
    shards = list_shards(manifest, dtype=dtype, max_shard_bytes=max_shard_bytes, parts=parts)
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with folder_to_be(target) as partial:
        with closing(SlicesReader(root, manifest)) as reader:
            for name, shard in zip(names, shards, strict=True):
                with writing(partial, name, shard) as writer:
                    _write(reader, manifest, writer, shard, parts, progress)
        if len(shards) > 1:
            write_index(partial, names, shards)
            names.append(INDEX)
        if like is not None:
            names += copy_companions(like, partial, {one.dtype for shard in shards for one in shard})
    return [target / name for name in names]


@contextlib.contextmanager
def folder_to_be(target: Path) -> Iterator[Path]:
    """Gives a folder to write into, which is at `target` afterwards, and nowhere if something failed.

    Raises `CheckpointError` where there is something already.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: is there already; name a folder that is to be made")
    partial = target.with_name(f"{target.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        make_folders(partial)
        yield partial
        sync_folder(partial)
        os.rename(partial, target)  # noqa: PTH104
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def copy_companions(source: Path, target: Path, dtypes: Collection[str]) -> list[str]:
    """Copies what a folder of Hugging Face's libraries has beside weights; its config says that these are of
    `dtypes`. Returns the names; raises `CheckpointError` where there is no config."""
    names = []
    for path in _list_companions(source):
        content = path.read_bytes()
        if path.name == _CONFIG:
            content = _say_dtype(path, content, dtypes)
        own = path.relative_to(source)
        make_folders((target / own).parent)
        write_file(target / own, content)
        names.append(str(own))
    return names


def _list_companions(folder: Path) -> list[Path]:
    """Files that say what a model and its tokenizer are."""
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"{folder}: has no {_CONFIG}: name the folder that the model came from")
    found = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name != INDEX)
    kept = [path for path in found if path.suffix in _COMPANIONS and not path.name.endswith(".index.json")]
    return kept + sorted((folder / _OTHER_TEMPLATES).glob("*.jinja"))


def _say_dtype(path: Path, content: bytes, dtypes: Collection[str]) -> bytes:
    """A model's config, which says in which dtype it is loaded."""
    try:
        config = dict(json.loads(content))
    except ValueError as error:
        raise CheckpointError(f"{path}: is no JSON: {error}") from None
    known = [_DTYPES[dtype] for dtype in dtypes if dtype in _DTYPES]
    if len(known) == 1:
        config.pop("torch_dtype", None)  # As it was called before.
        config["dtype"] = known[0]
    return (json.dumps(config, indent=2) + "\n").encode()


@contextlib.contextmanager
def writing(folder: Path, name: str, slices: Sequence[Slice]) -> Iterator[SlicesWriter]:
    """A writer of one file, which is there whole or not at all."""
    writer = SlicesWriter(folder, name, slices, says_where=False)
    try:
        yield writer
        writer.finish()
    finally:
        writer.abort()


def _write(
    reader: SlicesReader,
    manifest: Manifest,
    writer: SlicesWriter,
    shard: Sequence[Slice],
    parts: Mapping[str, Part],
    progress: OnBytes | None,
) -> None:
    for one in shard:
        box = parts[one.box.name].box
        saved = dtype_of(manifest, box.name, VALUE)
        for content in read_blocks(reader, box, saved):
            if saved != one.dtype:
                content = encode(decode(content, saved), one.dtype)
            writer.append(content.data)
            if progress is not None:
                progress(content.nbytes)
        if not one.num_bytes:
            writer.append(memoryview(b""))


def write_index(folder: Path, names: Sequence[str], shards: Shards) -> None:
    """Says which file each tensor is in."""
    files = {one.entry: name for name, shard in zip(names, shards, strict=True) for one in shard}
    total = sum(one.num_bytes for shard in shards for one in shard)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
