"""Exports a checkpoint that holds adapters alone: as `peft` lays them out, or merged into the weights beside
which they were trained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zorselike.checkpoint.blocks import dtype_of, rows_per_block, shape_of, split_rows
from zorselike.checkpoint.dtypes import FLOATS, decode, encode
from zorselike.checkpoint.export import (
    Shards,
    copy_companions,
    folder_to_be,
    write_index,
    writing,
)
from zorselike.checkpoint.layout import DTYPE_BYTES
from zorselike.checkpoint.manifest import Base, Manifest
from zorselike.checkpoint.read import SlicesReader, read_manifest
from zorselike.checkpoint.safetensors_file import (
    INDEX,
    WEIGHTS,
    SafetensorsFile,
    fingerprint_weights,
    open_folder,
)
from zorselike.checkpoint.slices import Slice, write_file
from zorselike.checkpoint.verify import OnBytes
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import VALUE, Box
from zorselike.text.wording import list_few

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a folder of `peft`."""

Values = NDArray[Any]

FILE_PREFIX = "base_model.model."
"""Of names in the files of `peft`."""
ADAPTER = ".default."
"""What `peft` calls the one adapter in a model, and leaves out in its files."""
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def list_adapters(manifest: Manifest, *, dtype: str | None = None) -> list[Slice]:
    """What `export_adapters` writes."""
    slices = []
    for name, tensor in manifest.tensors.items():
        if name.endswith((_A, _B)):
            box = Box.whole(FILE_PREFIX + name.replace(ADAPTER, "."), VALUE, tensor.shape)
            slices.append(Slice(box, dtype or tensor.dtype, tensor.shape))
    return sorted(slices, key=lambda one: one.entry)


def export_adapters(
    root: Path,
    target: Path,
    *,
    dtype: str | None = None,
    like: Path | None = None,
    progress: OnBytes | None = None,
) -> list[Path]:
    """Writes adapters so that `peft.PeftModel.from_pretrained(model, target)` takes them; returns the files.

    Args:
        root: a step's folder.
        target: folder to make; it is there when all of it is.
        dtype: as for `export`.
        like: where the model that they belong to is, if not where it was; `adapter_config.json` names it.
        progress: is told of bytes written.

    Raises:
        CheckpointError: What was saved is no adapters, or is incomplete or damaged; or there is something at
            the target.
        OSError: The target cannot be written.
    """
    manifest = read_manifest(root)
    config = dict(_base_of(root, manifest).adapter)
    if like is not None:
        config["base_model_name_or_path"] = str(like.absolute())
    slices = list_adapters(manifest, dtype=dtype)
    name_of = {FILE_PREFIX + name.replace(ADAPTER, "."): name for name in manifest.tensors}
    with folder_to_be(target) as partial, closing(SlicesReader(root, manifest)) as reader:
        with writing(partial, ADAPTER_WEIGHTS, slices) as writer:
            for one in slices:
                values = _read(reader, manifest, name_of[one.box.name])
                content = encode(values.reshape(-1), one.dtype)
                writer.write(content.data)
                if progress is not None:
                    progress(content.nbytes)
        write_file(partial / ADAPTER_CONFIG, json.dumps(config, indent=2, sort_keys=True).encode())
    return [target / name for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)]


def list_merged(root: Path, *, dtype: str | None = None, like: Path | None = None) -> Shards:
    """What `export_merged` writes: the tensors of each file."""
    return _convert(open_folder(find_base(root, read_manifest(root), like)), dtype)


def export_merged(
    root: Path,
    target: Path,
    *,
    dtype: str | None = None,
    like: Path | None = None,
    progress: OnBytes | None = None,
) -> list[Path]:
    """Writes the model with its adapters in it: W + B A · alpha / rank, computed in fp32 (fp64 where one of
    them is) for one block of rows at a time, and rounded once. Returns the files.

    Args:
        root: a step's folder.
        target: folder to make; it has the files of the model's own folder.
        dtype: of floating-point tensors, by its name in safetensors; None: as in that folder.
        like: the model's own folder, if it is no longer where it was.
        progress: is told of bytes written.

    Raises:
        CheckpointError: What was saved is no adapters, or is incomplete or damaged; the model is not there,
            or another; or there is something at the target.
        OSError: The target cannot be written.
    """
    manifest = read_manifest(root)
    folder = find_base(root, manifest, like)
    files = open_folder(folder)
    adapters = _match(manifest, folder, files)
    shards = _convert(files, dtype)
    names = [WEIGHTS] if len(files) == 1 else [file.path.name for file in files]
    with folder_to_be(target) as partial, closing(SlicesReader(root, manifest)) as reader:
        for name, file, shard in zip(names, files, shards, strict=True):
            with writing(partial, name, shard) as writer:
                for source, one in zip(file.slices, shard, strict=True):
                    adapter = adapters.get(source.box.name)
                    pair = None if adapter is None else adapter.load(reader, manifest)
                    for content in _merge(file, source, one.dtype, pair):
                        writer.append(content.data)
                        if progress is not None:
                            progress(content.nbytes)
                    if not one.num_bytes:
                        writer.append(memoryview(b""))
        if len(names) > 1:
            write_index(partial, names, shards)
            names.append(INDEX)
        names += copy_companions(folder, partial, {one.dtype for shard in shards for one in shard})
    return [target / name for name in names]


def find_base(root: Path, manifest: Manifest, like: Path | None) -> Path:
    """The folder of the model beside which adapters were trained.

    Raises:
        CheckpointError: They are no adapters, or the model is not there, or another.
    """
    base = _base_of(root, manifest)
    folder = like or Path(base.folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{root}: holds adapters of the model in {folder}, which is not there; name its folder "
            "(--like DIR)"
        )
    if fingerprint_weights(folder) != base.fingerprint:
        raise CheckpointError(
            f"{folder}: has other weights than those beside which the adapters of {root} were trained "
            f"({base.folder}); name that folder (--like DIR)"
        )
    return folder


def _base_of(root: Path, manifest: Manifest) -> Base:
    if manifest.base is None:
        raise CheckpointError(f"{root}: holds a whole model and no adapters; export it as it is")
    return manifest.base


@dataclass(frozen=True)
class _Pair:
    """A and B of one layer, in fp32 or fp64."""

    a: Values
    b: Values
    scale: float
    is_transposed: bool
    """Whether the layer's weight is `[inputs, outputs]`."""

    def rows(self, start: int, stop: int) -> Values:
        """What is added to these rows of the weight."""
        a, b = (self.a[:, start:stop], self.b) if self.is_transposed else (self.a, self.b[start:stop])
        added: Values = (b @ a) * self.scale
        return added.T if self.is_transposed else added


@dataclass(frozen=True)
class _Adapter:
    """Where the adapter of one layer is in a checkpoint."""

    layer: str
    scale: float
    is_transposed: bool

    def load(self, reader: SlicesReader, manifest: Manifest) -> _Pair:
        a, b = (_read(reader, manifest, self.layer + suffix) for suffix in (_A, _B))
        if a.dtype != np.float64:
            a, b = a.astype(np.float32), b.astype(np.float32)
        return _Pair(a, b, self.scale, self.is_transposed)


def _match(manifest: Manifest, folder: Path, files: Sequence[SafetensorsFile]) -> Mapping[str, _Adapter]:
    """The adapters by what the folder calls the weight of their layer, perhaps without the first part of the
    model's name for it."""
    assert manifest.base is not None
    config = manifest.base.adapter
    there = {one.box.name for file in files for one in file.slices}
    found, missing = {}, []
    for name in manifest.tensors:
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            weight = f"{layer}.weight"
            known = [known for known in (weight, weight.partition(".")[2]) if known in there]
            if known:
                scale = config["lora_alpha"] / config["r"]
                found[known[0]] = _Adapter(layer, scale, bool(config["fan_in_fan_out"]))
            else:
                missing.append(weight)
    if missing:
        raise CheckpointError(
            f"{folder}: has no {list_few(missing)} under that name; export the adapters, and let peft merge "
            "them (merge_and_unload)"
        )
    return found


def _merge(
    file: SafetensorsFile, source: Slice, dtype: str, pair: _Pair | None
) -> Iterator[NDArray[np.uint8]]:
    """The bytes of one tensor, block after block."""
    for part in split_rows(source.box, rows_per_block(source.box, source.dtype)):
        start, stop = (part.starts[0], part.stops[0]) if part.starts else (0, 1)
        content = np.empty(part.num_elements * DTYPE_BYTES[source.dtype], np.uint8)
        file.read_rows(source, start, stop, content.data)
        if pair is not None:
            values: Values = decode(content, source.dtype).reshape(part.shape)
            if values.dtype == np.float16:
                values = values.astype(np.float32)
            content = encode((values + pair.rows(start, stop)).reshape(-1), dtype)
        elif source.dtype != dtype:
            content = encode(decode(content, source.dtype), dtype)
        yield content


def _convert(files: Sequence[SafetensorsFile], dtype: str | None) -> Shards:
    return [
        [replace(one, dtype=dtype) if dtype and one.dtype in FLOATS else one for one in file.slices]
        for file in files
    ]


def _read(reader: SlicesReader, manifest: Manifest, name: str) -> Values:
    """A whole tensor."""
    shape, dtype = shape_of(manifest, name, VALUE), dtype_of(manifest, name, VALUE)
    content = np.empty(int(np.prod(shape)) * DTYPE_BYTES[dtype], np.uint8)
    reader.read_box(Box.whole(name, VALUE, shape), content.data)
    return decode(content, dtype).reshape(shape)
