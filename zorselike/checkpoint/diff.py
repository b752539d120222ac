"""Compares two checkpoints, whatever plans they were saved under: which tensors differ and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zorselike.checkpoint.blocks import dtype_of, read_blocks, rows_per_block, shape_of
from zorselike.checkpoint.dtypes import decode
from zorselike.checkpoint.layout import entry_name
from zorselike.checkpoint.manifest import Manifest
from zorselike.checkpoint.read import SlicesReader, read_manifest
from zorselike.checkpoint.verify import OnBytes
from zorselike.plan.holdings import Box

_OPTIONS = ("step", "rows_seen", "seed", "aliases", "optimizer", "loss_scale", "schedule", "plan", "extra")


@dataclass(frozen=True)
class Difference:
    """One thing that two checkpoints have differently."""

    name: str
    """Of a tensor, as files call it, or of a key of the manifest."""
    what: str


def diff(a: Path, b: Path, *, progress: OnBytes | None = None) -> list[Difference]:
    """What differs between the checkpoints in two steps' folders: keys of the manifest, then tensors.

    Args:
        a, b: steps' folders.
        progress: is told of bytes of `a` that have been compared.

    Raises:
        CheckpointError: One of them is incomplete or damaged.
    """
    left, right = read_manifest(a), read_manifest(b)
    found = [
        difference
        for key in _OPTIONS
        for difference in _compare_keys(key, getattr(left, key), getattr(right, key))
    ]
    with closing(SlicesReader(a, left)) as first, closing(SlicesReader(b, right)) as second:
        for name, kind in dict.fromkeys((*_list_tensors(left), *_list_tensors(right))):
            entry = entry_name(name, kind)
            if not (left.slices_of(name, kind) and right.slices_of(name, kind)):
                where = a if left.slices_of(name, kind) else b
                found.append(Difference(entry, f"only in {where}"))
                continue
            facts = [(shape_of(m, name, kind), dtype_of(m, name, kind)) for m in (left, right)]
            if facts[0][0] != facts[1][0]:
                found.append(Difference(entry, f"shape {facts[0][0]} and {facts[1][0]}"))
                continue
            if facts[0][1] != facts[1][1]:
                found.append(Difference(entry, f"dtype {facts[0][1]} and {facts[1][1]}"))
            own = _compare_values(
                first, second, (name, kind), facts[0][0], (facts[0][1], facts[1][1]), progress
            )
            if own is not None:
                found.append(own)
    return found


def _list_tensors(manifest: Manifest) -> list[tuple[str, str]]:
    return [(name, kind) for name in manifest.tensors for kind in manifest.kinds_of(name)]


def _compare_keys(key: str, left: object, right: object) -> list[Difference]:
    if left == right:
        return []
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return [
            difference
            for inner in dict.fromkeys((*left, *right))
            for difference in _compare_keys(f"{key}.{inner}", left.get(inner), right.get(inner))
        ]
    if key == "plan":
        return [Difference(key, "differs")]
    for which, other, one in (("first", right, left), ("second", left, right)):
        if other is None and isinstance(one, Mapping):
            return [Difference(key, f"only in the {which}")]
    return [Difference(key, f"{left!r} and {right!r}")]


def _compare_values(
    first: SlicesReader,
    second: SlicesReader,
    key: tuple[str, str],
    shape: tuple[int, ...],
    dtypes: tuple[str, str],
    progress: OnBytes | None,
) -> Difference | None:
    box = Box.whole(*key, shape)
    row_limit = min(rows_per_block(box, dtype) for dtype in dtypes)
    num_different, largest = 0, 0.0
    for own, other in zip(
        read_blocks(first, box, dtypes[0], row_limit),
        read_blocks(second, box, dtypes[1], row_limit),
        strict=True,
    ):
        if progress is not None:
            progress(own.nbytes)
        if dtypes[0] == dtypes[1] and np.array_equal(own, other):
            continue
        apart = _subtract(decode(own, dtypes[0]), decode(other, dtypes[1]))
        num_different += len(apart)
        largest = float(np.max(apart, initial=largest))  # NaN, if one of them is.
    if not num_different:
        return None
    return Difference(
        entry_name(*key), f"{num_different} of {box.num_elements} elements, by up to {largest:.3g}"
    )


def _subtract(a: NDArray[np.generic], b: NDArray[np.generic]) -> NDArray[np.float64]:
    """Absolute differences where values differ; two that are no numbers are equal."""
    left, right = a.astype(np.float64), b.astype(np.float64)
    differ = (a != b) & ~(np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        apart: NDArray[np.float64] = np.abs(left[differ] - right[differ])
    return apart
