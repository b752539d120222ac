"""Exports a checkpoint's weights as safetensors files of whole tensors, as Hugging Face's libraries lay
them out: `model.safetensors`, or numbered files and an index."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from zorselike.checkpoint.blocks import dtype_of, read_blocks
from zorselike.checkpoint.dtypes import FLOATS, decode, encode
from zorselike.checkpoint.manifest import Manifest
from zorselike.checkpoint.read import SlicesReader, read_manifest
from zorselike.checkpoint.safetensors_file import INDEX, WEIGHTS, open_folder
from zorselike.checkpoint.slices import Slice, SlicesWriter, make_folders, sync_folder, write_file
from zorselike.checkpoint.verify import OnBytes
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import VALUE, Box

AS_IN_MODEL = "model"
"""Instead of a dtype: each tensor in the one that the model was given in."""
SHARD_BYTES = 5 * 10**9

Shards = list[list[Slice]]
"""The tensors of each file."""

_CONFIG = "config.json"
_COMPANIONS = frozenset((".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"))
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def list_shards(
    manifest: Manifest,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    aliases: bool = False,
) -> Shards:
    """What is written; see `export`."""
    names = [*manifest.tensors, *(manifest.aliases if aliases else ())]
    shards: Shards = []
    room = 0
    for name in names:
        tensor = manifest.tensors[manifest.aliases.get(name, name)]
        wanted = tensor.model_dtype if dtype == AS_IN_MODEL else dtype
        if wanted not in FLOATS or tensor.dtype not in FLOATS:  # Counts and masks stay what they are.
            wanted = tensor.dtype
        one = Slice(Box.whole(name, VALUE, tensor.shape), wanted, tensor.shape)
        if not shards or one.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(one)
        room -= one.num_bytes
    return shards or [[]]


def export(
    root: Path,
    target: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    aliases: bool = False,
    like: Path | None = None,
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
        progress: is told of bytes written.

    Raises:
        CheckpointError: What was saved is incomplete or damaged, there is something at the target, or `like`
            has no `config.json`, or weights of another model.
        OSError: The target cannot be written.
    """
    manifest = read_manifest(root)
    if manifest.base is not None:
        raise CheckpointError(f"{root}: holds adapters, without the model of {manifest.base.folder}")
    if like is not None:
        _list_companions(like)
        _refuse_other_model(manifest, like)
    shards = list_shards(manifest, dtype=dtype, max_shard_bytes=max_shard_bytes, aliases=aliases)
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with folder_to_be(target) as partial:
        with closing(SlicesReader(root, manifest)) as reader:
            for name, shard in zip(names, shards, strict=True):
                _write(
                    reader, manifest, SlicesWriter(partial, name, shard, says_where=False), shard, progress
                )
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
        write_file(target / path.name, content)
        names.append(path.name)
    return names


def _list_companions(folder: Path) -> list[Path]:
    """Files that say what a model and its tokenizer are."""
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"{folder}: has no {_CONFIG}: name the folder that the model came from")
    found = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name != INDEX)
    return [path for path in found if path.suffix in _COMPANIONS and not path.name.endswith(".index.json")]


def _refuse_other_model(manifest: Manifest, folder: Path) -> None:
    """Raises `CheckpointError` where a folder has weights of other names or shapes than the checkpoint. Its
    names may lack the first part of the model's."""
    if not any(folder.glob("*.safetensors")):
        return
    there = {one.box.name: one.shape for file in open_folder(folder) for one in file.slices}
    tied = {*manifest.aliases, *manifest.aliases.values()}  # It has any one of their names.
    for name, tensor in manifest.tensors.items():
        shape = there.get(name, there.get(name.partition(".")[2]))
        if shape != tensor.shape and (shape is not None or name not in tied):
            found = f"has {shape}" if shape is not None else "has no such weight"
            raise CheckpointError(
                f"{folder}: is of another model: {name} is {tensor.shape} in the checkpoint, and the folder "
                f"{found}; name the folder of the model that was trained"
            )


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


def _write(
    reader: SlicesReader,
    manifest: Manifest,
    writer: SlicesWriter,
    shard: Sequence[Slice],
    progress: OnBytes | None,
) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(writer.abort)
        for one in shard:
            name = manifest.aliases.get(one.box.name, one.box.name)
            saved = dtype_of(manifest, name, VALUE)
            for content in read_blocks(reader, Box.whole(name, VALUE, one.shape), saved):
                if saved != one.dtype:
                    content = encode(decode(content, saved), one.dtype)
                writer.append(content.data)
                if progress is not None:
                    progress(content.nbytes)
            if not one.num_bytes:
                writer.append(memoryview(b""))
        writer.finish()


def write_index(folder: Path, names: Sequence[str], shards: Shards) -> None:
    """Says which file each tensor is in."""
    files = {one.entry: name for name, shard in zip(names, shards, strict=True) for one in shard}
    total = sum(one.num_bytes for shard in shards for one in shard)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
