"""Small checkpoints of numpy arrays, cut at random, as ranks would write them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from zorselike.checkpoint.folder import commit, make_partial
from zorselike.checkpoint.layout import slices_file
from zorselike.checkpoint.manifest import FileRecord, Manifest, TensorRecord
from zorselike.checkpoint.read import SlicesReader
from zorselike.checkpoint.slices import Slice, SlicesWriter
from zorselike.plan.holdings import VALUE, Box, subtract

Tensors = Mapping[tuple[str, str], np.ndarray]
"""Arrays by name and kind."""

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}


def make_tensors(seed: int = 0) -> dict[tuple[str, str], np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors: dict[tuple[str, str], np.ndarray] = {}
    for name, shape in {"a.w": (7, 5), "a.b": (7,), "emb": (11, 3, 2), "scale": ()}.items():
        for kind in (VALUE, "exp_avg", "exp_avg_sq"):
            tensors[name, kind] = np.asarray(rng.standard_normal(shape), np.float32)
    tensors["frozen", VALUE] = rng.integers(0, 9, (4,))
    return tensors


def whole_box(key: tuple[str, str], tensors: Tensors) -> Box:
    return Box(*key, (0,) * tensors[key].ndim, tensors[key].shape)


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    slices = tuple(slice(a, b) for a, b in zip(box.starts, box.stops, strict=True))
    return np.ascontiguousarray(array[slices]).reshape(box.shape)


def divide(box: Box, rng: random.Random, num_parts: int, *, columns: bool = False) -> list[Box]:
    """A box as parts of random sizes, by rows or any dimension."""
    parts = [box]
    while len(parts) < num_parts and box.starts:
        largest = max(parts, key=lambda part: part.num_elements)
        axis = rng.randrange(len(box.starts)) if columns else 0
        if largest.shape[axis] < 2:
            break
        at = rng.randrange(largest.starts[axis] + 1, largest.stops[axis])
        stops = tuple(at if i == axis else stop for i, stop in enumerate(largest.stops))
        piece = Box(box.name, box.kind, largest.starts, stops)
        parts.remove(largest)
        parts += [piece, *subtract(largest, piece)]
    return parts


def write_files(
    root: Path, tensors: Tensors, *, num_ranks: int = 3, seed: int = 0, columns: bool = False
) -> tuple[FileRecord, ...]:
    """Files of each rank: values in one, optimizer states in the other."""
    rng = random.Random(seed)
    held: dict[str, list[Box]] = {}
    for key in tensors:
        parts = divide(whole_box(key, tensors), rng, num_ranks, columns=columns)
        ranks = rng.sample(range(num_ranks), len(parts))
        for rank, box in zip(ranks, parts, strict=True):
            held.setdefault(slices_file("model" if box.kind == VALUE else "optim", rank), []).append(box)
    return tuple(write_file(root, file, boxes, tensors) for file, boxes in sorted(held.items()))


def write_file(root: Path, file: str, boxes: list[Box], tensors: Tensors) -> FileRecord:
    arrays = [tensors[box.name, box.kind] for box in boxes]
    described = [
        Slice(box, DTYPES[str(array.dtype)], array.shape) for box, array in zip(boxes, arrays, strict=True)
    ]
    writer = SlicesWriter(root, file, described)
    try:
        for box, array in zip(boxes, arrays, strict=True):
            writer.write(memoryview(cut(array, box)))
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def make_manifest(step: int, files: tuple[FileRecord, ...], tensors: Tensors) -> Manifest:
    return Manifest(
        step=step,
        rows_seen=8 * step,
        seed=0,
        tensors={
            name: TensorRecord(
                array.shape, DTYPES[str(array.dtype)], DTYPES[str(array.dtype)], name != "frozen"
            )
            for (name, kind), array in tensors.items()
            if kind == VALUE
        },
        files=files,
        aliases={"head.w": "a.w"} if ("a.w", VALUE) in tensors else {},
        optimizer={"class": "AdamW", "options": [{"lr": 1e-5, "betas": [0.9, 0.95]}], "of": {"a.w": 0}},
        loss_scale={"scale": 65536.0, "good_steps": 3},
        schedule=None,
        plan="version = 1\n# größer\n",
        extra={"best": 1.5, "name": "x"},
        versions={"zorselike": "0.1.0"},
        saved_at="2026-01-02T03:04:05+00:00",
    )


def save(folder: Path, step: int, tensors: Tensors, *, seed: int = 0, columns: bool = False) -> Path:
    """A whole checkpoint, as one writer makes it."""
    partial = make_partial(folder, step)
    files = write_files(partial, tensors, seed=seed, columns=columns)
    return commit(partial, make_manifest(step, files, tensors))


def load(root: Path, manifest: Manifest, tensors: Tensors) -> dict[tuple[str, str], np.ndarray]:
    """All tensors of a checkpoint, whole."""
    reader = SlicesReader(root, manifest)
    found = {}
    try:
        for key, array in tensors.items():
            found[key] = np.empty_like(array)
            reader.read_box(whole_box(key, tensors), memoryview(found[key]))
    finally:
        reader.close()
    return found
