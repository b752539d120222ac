"""`zorselike checkpoint export` and `import`: weights as safetensors files of whole tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zorselike.checkpoint.adapters import export_adapters, export_merged, list_adapters, list_merged
from zorselike.checkpoint.export import AS_IN_MODEL, Shards, export, list_shards
from zorselike.checkpoint.imported import import_files
from zorselike.checkpoint.read import read_manifest
from zorselike.checkpoint.safetensors_file import list_files
from zorselike.cli.checkpoint.paths import CheckpointPath, find_checkpoint, show_bytes_done
from zorselike.cli.options import read_size
from zorselike.errors import CheckpointError
from zorselike.text.wording import count

_DTYPES = {
    "saved": None,
    "model": AS_IN_MODEL,
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float64": "F64",
}


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint's weights as safetensors files of whole tensors, under the model's own names.

    Of adapters (LoRA) a folder as peft writes it, or with --merge the model with them in it."""

    path: CheckpointPath
    """A step's folder; of a folder of checkpoints the newest complete one."""

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder to make: model.safetensors in it, or several files and model.safetensors.index.json."""

    dtype: Literal["saved", "model", "float32", "bfloat16", "float16", "float64"] = "saved"
    """Of floating-point weights. saved: as they are in the checkpoint, which for a model in half precision is
    the fp32 master (with --merge: as in the model's folder); model: as the model was given."""

    max_shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "5GB"
    """Size of a file, unless one tensor alone is larger."""

    aliases: bool = False
    """Write tied weights under each of their names."""

    like: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: none)")] = None
    """Folder of the Hugging Face model that was trained: weights get the names that they have there, and its
    config and tokenizer files are copied, so that transformers' from_pretrained takes TARGET as it is. For
    adapters only where that folder has moved."""

    merge: bool = False
    """Put adapters into the model beside which they were trained, and write that: W + B A alpha / rank,
    computed in fp32 and rounded once. Its files are those of the model's folder."""

    def run(self) -> None:
        root = find_checkpoint(self.path)
        manifest = read_manifest(root)
        like = None if self.like is None else Path(self.like)
        files = self._export_adapters(root, like) if manifest.base or self.merge else self._export(root, like)
        print(f"{root} exported to:")
        for file in files:
            print(f"  {file}")

    def _export(self, root: Path, like: Path | None) -> list[Path]:
        max_shard_bytes = read_size("checkpoint export", "--max-shard-size", self.max_shard_size)
        assert max_shard_bytes is not None
        dtype = _DTYPES[self.dtype]
        manifest, parts = read_manifest(root), None
        if like is not None:
            from zorselike.hf import find_parts  # It imports torch.

            parts = find_parts(manifest, like)
        shards = list_shards(
            manifest, dtype=dtype, max_shard_bytes=max_shard_bytes, aliases=self.aliases, parts=parts
        )
        with show_bytes_done(f"export {root.name}", _num_bytes(shards)) as progress:
            return export(
                root,
                Path(self.target),
                dtype=dtype,
                max_shard_bytes=max_shard_bytes,
                aliases=self.aliases,
                like=like,
                parts=parts,
                progress=progress,
            )

    def _export_adapters(self, root: Path, like: Path | None) -> list[Path]:
        for flag, is_given in (
            ("--aliases", self.aliases),
            ("--max-shard-size", self.max_shard_size != type(self).max_shard_size),
        ):
            if is_given:
                files = "the files of the model's folder" if self.merge else "one file, as peft has it"
                raise CheckpointError(
                    f"checkpoint export: {flag}: of adapters it writes {files}; leave it out"
                )
        dtype = None if self.dtype == "model" else _DTYPES[self.dtype]
        target = Path(self.target)
        if self.merge:
            shards = list_merged(root, dtype=dtype, like=like)
            with show_bytes_done(f"merge {root.name}", _num_bytes(shards)) as progress:
                return export_merged(root, target, dtype=dtype, like=like, progress=progress)
        adapters = list_adapters(read_manifest(root), dtype=dtype)
        with show_bytes_done(f"export {root.name}", _num_bytes([adapters])) as progress:
            return export_adapters(root, target, dtype=dtype, like=like, progress=progress)


def _num_bytes(shards: Shards) -> int:
    return sum(one.num_bytes for shard in shards for one in shard)


@dataclass(frozen=True, kw_only=True)
class Import:
    """Make a checkpoint of weights in safetensors files, under the model's own names. Training begins with it
    at step 0."""

    paths: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(
            metavar="FILES... FOLDER",
            help_behavior_hint="(required)",
        ),
    ]
    """Safetensors files, or folders of them; last the folder of checkpoints, which is made if need be."""

    def run(self) -> None:
        if len(self.paths) < 2:
            raise CheckpointError("checkpoint import: give one or more safetensors files, then a folder")
        *files, folder = map(Path, self.paths)
        sizes = (path.stat().st_size for path in list_files(files) if path.is_file())
        with show_bytes_done("import", sum(sizes)) as progress:
            root = import_files(files, folder, progress=progress)
        print(f"{count(len(read_manifest(root).tensors), 'tensor')} imported to {root}")
