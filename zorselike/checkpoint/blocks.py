"""Whole tensors read in blocks of rows, so that a large one is never in memory at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from zorselike.checkpoint.layout import DTYPE_BYTES
from zorselike.checkpoint.manifest import Manifest
from zorselike.checkpoint.read import SlicesReader
from zorselike.plan.holdings import Box

_BLOCK_BYTES = 64 * 2**20


def shape_of(manifest: Manifest, name: str, kind: str) -> tuple[int, ...]:
    """Of a tensor's values or of a state of the optimizer."""
    places = manifest.slices_of(name, kind)
    return places[0][1].shape if places else manifest.tensors[name].shape


def dtype_of(manifest: Manifest, name: str, kind: str) -> str:
    places = manifest.slices_of(name, kind)
    return places[0][1].dtype if places else manifest.tensors[name].dtype


def split_rows(box: Box, row_limit: int) -> Iterator[Box]:
    """A box in parts of so many rows; a number's stays as it is."""
    if not box.starts:
        yield box
        return
    for start in range(box.starts[0], box.stops[0], row_limit):
        stop = min(start + row_limit, box.stops[0])
        yield Box(box.name, box.kind, (start, *box.starts[1:]), (stop, *box.stops[1:]))


def rows_per_block(box: Box, dtype: str) -> int:
    row_bytes = box.num_elements * DTYPE_BYTES[dtype] // max(1, box.shape[0] if box.shape else 1)
    return max(1, _BLOCK_BYTES // max(1, row_bytes))


def read_blocks(
    reader: SlicesReader, box: Box, dtype: str, row_limit: int | None = None
) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor, or of a box in it, block after block."""
    for part in split_rows(box, row_limit or rows_per_block(box, dtype)):
        content = np.empty(part.num_elements * DTYPE_BYTES[dtype], np.uint8)
        reader.read_box(part, content.data)
        yield content
