"""The manifest: everything about a checkpoint but the tensors' bytes, and the checksums of these.

Its text is JSON, and begins with a line that holds the format's version and the SHA-256 of all that follows,
so that every change of it is found, also where it stays valid JSON. What it says is checked as input from
outside: names of files lead nowhere else, and every byte of a file has a checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zorselike.checkpoint.layout import (
    CHUNK_BYTES,
    DTYPE_BYTES,
    entry_name,
    is_slices_file,
)
from zorselike.errors import CheckpointError, FileError
from zorselike.plan.holdings import VALUE, Box
from zorselike.text.dataclass_tables import check_keys, join, read_table, read_value, wrong_value
from zorselike.text.wording import show_value

FORMAT = "zorselike-checkpoint"
VERSION = 1

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class SliceRecord:
    """A slice of a tensor in a file."""

    box: Box
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: int
    """Bytes from the file's start."""
    sums: tuple[int, ...]
    """CRC32 of every `CHUNK_BYTES` of the slice."""

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def entry(self) -> str:
        return entry_name(self.box.name, self.box.kind)

    def to_table(self) -> dict[str, Any]:
        box = self.box
        return {
            "name": box.name,
            "kind": box.kind,
            "starts": box.starts,
            "stops": box.stops,
            "shape": self.shape,
            "dtype": self.dtype,
            "offset": self.offset,
            "sums": self.sums,
        }

    @classmethod
    def from_table(cls, value: object, where: str = "the slice") -> SliceRecord:
        table = _read_keys(value, where, _SLICE_KEYS)
        starts, stops, shape = (_read_sizes(table, key, where) for key in ("starts", "stops", "shape"))
        name, kind = _read(str, table, "name", where), _read(str, table, "kind", where)
        if not len(starts) == len(stops) == len(shape):
            raise FileError(f"{where}: starts, stops and shape must be of equally many dimensions")
        if not all(a <= b <= c for a, b, c in zip(starts, stops, shape, strict=True)):
            raise FileError(f"{where}: {name} from {starts} to {stops} is not inside {shape}")
        record = cls(
            Box(name, kind, starts, stops),
            _read_dtype(table, "dtype", where),
            shape,
            _read_size(table, "offset", where),
            _read_sizes(table, "sums", where),
        )
        if len(record.sums) != -(-record.num_bytes // CHUNK_BYTES):
            raise FileError(f"{where}.sums: {len(record.sums)} checksums do not fit {record.num_bytes} bytes")
        return record


@dataclass(frozen=True)
class FileRecord:
    """A safetensors file: its header, then its slices without gaps."""

    file: str
    """Its path inside the step's folder, such as `model/rank-00003.safetensors`."""
    num_bytes: int
    header_sum: int
    """CRC32 of the header and the 8 bytes of its length."""
    slices: tuple[SliceRecord, ...]

    @property
    def header_bytes(self) -> int:
        """With the 8 of its length."""
        return self.slices[0].offset if self.slices else self.num_bytes

    def to_table(self) -> dict[str, Any]:
        """For JSON, as ranks send it."""
        return {
            "file": self.file,
            "num_bytes": self.num_bytes,
            "header_sum": self.header_sum,
            "slices": [record.to_table() for record in self.slices],
        }

    @classmethod
    def from_table(cls, value: object, where: str = "the file") -> FileRecord:
        """The inverse; raises `FileError`."""
        table = _read_keys(value, where, _FILE_KEYS)
        file = _read(str, table, "file", where)
        if not is_slices_file(file):
            raise FileError(f"{where}.file is {show_value(file)}, which is no file of a checkpoint")
        slices = _read(list, table, "slices", where)
        record = cls(
            file,
            _read_size(table, "num_bytes", where),
            _read_size(table, "header_sum", where),
            tuple(SliceRecord.from_table(one, f"{where}.slices[{i}]") for i, one in enumerate(slices)),
        )
        end = record.header_bytes
        for one in record.slices:
            if one.offset != end:
                raise FileError(f"{where}: {one.entry} begins at byte {one.offset} and not at {end}")
            end += one.num_bytes
        if end != record.num_bytes or record.header_bytes < _LENGTH_BYTES:
            raise FileError(f"{where}: header and slices are not the file's {record.num_bytes} bytes")
        return record


@dataclass(frozen=True)
class TensorRecord:
    """A parameter or buffer of the model."""

    shape: tuple[int, ...]
    dtype: str
    """As saved, by its name in safetensors."""
    model_dtype: str
    """As the model was given."""
    trains: bool

    def to_table(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "dtype": self.dtype,
            "model_dtype": self.model_dtype,
            "trains": self.trains,
        }

    @classmethod
    def from_table(cls, value: object, where: str) -> TensorRecord:
        table = _read_keys(value, where, _TENSOR_KEYS)
        return cls(
            _read_sizes(table, "shape", where),
            _read_dtype(table, "dtype", where),
            _read_dtype(table, "model_dtype", where),
            _read(bool, table, "trains", where),
        )


@dataclass(frozen=True)
class Base:
    """A folder of weights, beside which adapters are trained; a checkpoint does not hold them."""

    folder: str
    fingerprint: str
    """Of its weights: `safetensors_file.fingerprint_weights`."""
    adapter: Mapping[str, Any]
    """What is trained beside them, as `peft` says it in `adapter_config.json`."""

    @classmethod
    def from_table(cls, value: object) -> Base:
        table = _read_keys(value, "base", _BASE_KEYS)
        folder, fingerprint = (_read(str, table, key, "base") for key in ("folder", "fingerprint"))
        return cls(folder, fingerprint, _read_mapping(table, "adapter"))


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. All that is not a record is JSON: strings, numbers, lists, mappings."""

    step: int
    rows_seen: int
    seed: int
    tensors: Mapping[str, TensorRecord]
    files: tuple[FileRecord, ...]
    aliases: Mapping[str, str]
    """Other names of a tensor, with the name that it is saved under (tied weights)."""
    optimizer: Mapping[str, Any] | None
    """Class, options and scalar state; None: the model alone is saved."""
    loss_scale: Mapping[str, float] | None
    schedule: Mapping[str, Any] | None
    """State of learning-rate schedulers."""
    plan: str | None
    """Its TOML text."""
    extra: Mapping[str, Any]
    """What the user added."""
    versions: Mapping[str, str]
    saved_at: str
    """ISO 8601, UTC."""
    base: Base | None = None
    """Where the frozen weights are that belong to it, if it does not hold them."""

    def slices_of(self, name: str, kind: str) -> tuple[tuple[FileRecord, SliceRecord], ...]:
        """Where the parts of a tensor are; nothing if there is no such tensor."""
        return self._index.get(name, {}).get(kind, ())

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """What is saved of a tensor: its values, states of the optimizer."""
        return tuple(self._index.get(name, ()))

    def renamed(self, names: Mapping[str, str]) -> Manifest:
        """The same with other names of tensors, of their aliases: what reads from it asks for these."""
        if not names:
            return self

        def rename(table: Any) -> Any:
            return {names.get(name, name): value for name, value in table.items()}

        def rename_slices(file: FileRecord) -> FileRecord:
            slices = (
                replace(one, box=replace(one.box, name=names.get(one.box.name, one.box.name)))
                for one in file.slices
            )
            return replace(file, slices=tuple(slices))

        optimizer, schedule = self.optimizer, self.schedule
        if optimizer is not None:
            parts = {key: rename(optimizer[key]) for key in ("of", "numbers") if key in optimizer}
            optimizer = {**optimizer, **parts}
        if schedule is not None and "of" in schedule:
            schedule = {**schedule, "of": rename(schedule["of"])}
        return replace(
            self,
            tensors=rename(self.tensors),
            files=tuple(map(rename_slices, self.files)),
            aliases={
                name: names.get(own, own) for name, own in self.aliases.items() if name not in names.values()
            }
            | dict(names),
            optimizer=optimizer,
            schedule=schedule,
        )

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file.num_bytes for file in self.files)

    @cached_property
    def _index(self) -> Mapping[str, Mapping[str, tuple[tuple[FileRecord, SliceRecord], ...]]]:
        index: dict[str, dict[str, list[tuple[FileRecord, SliceRecord]]]] = {}
        for file in self.files:
            for record in file.slices:
                places = index.setdefault(record.box.name, {}).setdefault(record.box.kind, [])
                places.append((file, record))
        return {name: {kind: tuple(own) for kind, own in kinds.items()} for name, kinds in index.items()}

    def to_text(self) -> str:
        """The text that `from_text` reads back equal.

        Raises:
            CheckpointError: It contradicts itself, or something is not JSON, such as a tensor or an infinite
                number in `extra`: said now, not when somebody loads it.
        """
        try:
            self._check_names()
        except FileError as error:
            raise CheckpointError(f"{error}") from None
        table = {key: getattr(self, key) for key in _MANIFEST_KEYS if key != "base"}
        if self.base is not None:
            table["base"] = {key: getattr(self.base, key) for key in _BASE_KEYS}
        table["tensors"] = {name: record.to_table() for name, record in self.tensors.items()}
        table["files"] = [file.to_table() for file in self.files]
        lines = []
        for key, value in table.items():
            if key not in ("tensors", "files"):
                check_json(value, key)
            lines.append(f'"{key}": {json.dumps(value, separators=(",", ":"), default=dict)}')
        body = ",\n".join(lines) + "\n}\n"
        return _first_line(hashlib.sha256(body.encode()).hexdigest()) + body

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """What a manifest says.

        Raises:
            CheckpointError: It is cut off or changed, of a newer version, or not a manifest.
        """
        try:
            return cls._from_table(_parse(text))
        except FileError as error:
            raise CheckpointError(f"{error}") from None

    @classmethod
    def _from_table(cls, table: Mapping[str, Any]) -> Manifest:
        where = ""
        check_keys(table, where, _MANIFEST_KEYS)
        tensors = _read_mapping(table, "tensors")
        aliases = _read_mapping(table, "aliases")
        versions = _read_mapping(table, "versions")
        loss_scale = _read_mapping(table, "loss_scale", or_none=True)
        manifest = cls(
            step=_read_size(table, "step", where),
            rows_seen=_read_size(table, "rows_seen", where),
            seed=_read(int, table, "seed", where),
            tensors={
                name: TensorRecord.from_table(one, join("tensors", name)) for name, one in tensors.items()
            },
            files=tuple(
                FileRecord.from_table(one, f"files[{i}]")
                for i, one in enumerate(_read(list, table, "files", where))
            ),
            aliases={name: _read(str, aliases, name, "aliases") for name in aliases},
            optimizer=_read_mapping(table, "optimizer", or_none=True),
            loss_scale=loss_scale,
            schedule=_read_mapping(table, "schedule", or_none=True),
            plan=None if table.get("plan", "") is None else _read(str, table, "plan", where),
            extra=_read_mapping(table, "extra"),
            versions={name: _read(str, versions, name, "versions") for name in versions},
            saved_at=_read(str, table, "saved_at", where),
            base=Base.from_table(table["base"]) if "base" in table else None,
        )
        for key, value in (loss_scale or {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise wrong_value(join("loss_scale", key), value, "a number")
        manifest._check_names()
        return manifest

    def _check_names(self) -> None:
        """Raises `FileError` where records contradict each other."""
        for name, tensor in self.tensors.items():
            for dtype in (tensor.dtype, tensor.model_dtype):
                if dtype not in DTYPE_BYTES:
                    raise FileError(f"tensors.{name} is of dtype {dtype!r}, which safetensors does not have")
        files = [file.file for file in self.files]
        if len(set(files)) < len(files):
            raise FileError("files: one is there twice")
        for file in self.files:
            for box, shape in ((record.box, record.shape) for record in file.slices):
                known = self.tensors.get(box.name)
                if known is None or (box.kind == VALUE and known.shape != shape):
                    raise FileError(f"{file.file}: {box.name} of shape {shape} is not among the tensors")
        for name, original in self.aliases.items():
            if original not in self.tensors:
                raise FileError(f"aliases.{name} is {original!r}, which is not among the tensors")


_SLICE_KEYS = ("name", "kind", "starts", "stops", "shape", "dtype", "offset", "sums")
_FILE_KEYS = ("file", "num_bytes", "header_sum", "slices")
_TENSOR_KEYS = ("shape", "dtype", "model_dtype", "trains")
_BASE_KEYS = tuple(Base.__dataclass_fields__)
_MANIFEST_KEYS = tuple(Manifest.__dataclass_fields__)


# -- the text --------------------------------------------------------------------------------


def _first_line(digest: str) -> str:
    return f'{{"format": "{FORMAT}", "version": {VERSION}, "sha256": "{digest}",\n'


def _parse(text: str) -> Mapping[str, Any]:
    """The table without what the first line says of it, which holds."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also of a number of thousands of digits.
        raise FileError(f"is cut off or damaged: it is not JSON ({error})") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise FileError('is no manifest of a checkpoint, or damaged: it does not say "format": ' + FORMAT)
    version = table.get("version")
    if isinstance(version, int) and version > VERSION:
        raise FileError(
            f"is of format version {version}; this zorselike reads version {VERSION}: upgrade zorselike"
        )
    first, _, body = text.partition("\n")
    if first + "\n" != _first_line(hashlib.sha256(body.encode(errors="replace")).hexdigest()):
        raise FileError("was changed since it was saved: its SHA-256 differs")
    return {key: value for key, value in table.items() if key not in ("format", "version", "sha256")}


def check_json(value: object, where: str) -> None:
    """Raises `CheckpointError`, which says `where`, for what JSON would not give back equal."""
    if isinstance(value, Mapping):
        for key, own in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {show_value(key)}; keys in JSON are strings")
            check_json(own, join(where, key))
    elif isinstance(value, list | tuple):
        for i, own in enumerate(value):
            check_json(own, f"{where}[{i}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise CheckpointError(f"{where} is a {type(value).__name__}; only what JSON has is saved there")
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{where} is {value}, a number that JSON does not have; save it as text")


# -- its values ------------------------------------------------------------------------------


def _read_keys(value: object, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    table = read_table(value, where)
    check_keys(table, where, keys)
    return table


def _read(kind: type, table: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in table:
        raise FileError(f"{join(where, key)} is missing")
    value = table[key]
    if type(value) is kind:  # There are millions of them.
        return value
    if kind is list:
        raise wrong_value(join(where, key), value, "a list")
    return read_value(kind, value, join(where, key))


def _read_size(table: Mapping[str, Any], key: str, where: str) -> int:
    size: int = _read(int, table, key, where)
    if size < 0:
        raise wrong_value(join(where, key), size, "0 or more")
    return size


def _read_sizes(table: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    sizes = _read(list, table, key, where)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise wrong_value(join(where, key), sizes, "a list of integers, 0 or more")
    return tuple(sizes)


def _read_dtype(table: Mapping[str, Any], key: str, where: str) -> str:
    dtype: str = _read(str, table, key, where)
    if dtype not in DTYPE_BYTES:
        raise wrong_value(join(where, key), dtype, f"one of {', '.join(DTYPE_BYTES)}")
    return dtype


def _read_mapping(table: Mapping[str, Any], key: str, *, or_none: bool = False) -> Any:
    if key in table and table[key] is None and or_none:
        return None
    if key not in table:
        raise FileError(f"{key} is missing")
    return read_table(table[key], key)
