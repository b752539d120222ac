"""Dropout in layers that are cut, with the masks of one process.

All ranks of a replica begin a layer's microbatch with the same random state (`ministage/random_numbers.py`).
It stays the same, and that of one process, where each draws for the whole of what is dropped from, of which
it has a part: some columns of what is cut, or, between blocks, some positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from zorselike.errors import ConfigError
from zorselike.runtime.tensor_parallel.sequence import OwnPositions


def find_between(layer: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Dropout]]:
    """What drops hidden states outside of a layer's blocks, by its name in the layer."""
    inside = {id(module) for block in blocks for module in block.modules()}
    for name, module in layer.named_modules():
        if type(module) is nn.Dropout and id(module) not in inside:
            yield name, module


def drop_columns(dropout: nn.Dropout, columns: tuple[int, int], width: int, x: Tensor) -> Tensor:
    """`x`, the columns `[start, stop)` of something so wide, with what one process drops of them dropped."""
    shape = (*x.shape[:-1], width)
    return _drop(dropout, x, shape, lambda mask: mask[..., slice(*columns)])


def drop_positions(dropout: nn.Dropout, positions: OwnPositions, x: Tensor) -> Tensor:
    """`x`, a rank's positions of hidden states, with what one process drops of them dropped.

    Raises `ConfigError` for anything else.
    """
    if x.dim() != 3 or x.shape[1] != positions.size:
        raise ConfigError(
            f"a dropout in a layer that is cut is given {list(x.shape)}, and not [rows, {positions.size} "
            "positions, width]: set it to 0, or list single ranks in the plan"
        )
    return _drop(dropout, x, (x.shape[0], positions.length, x.shape[2]), positions.slice)


def _drop(dropout: nn.Dropout, x: Tensor, shape: Sequence[int], take: Callable[[Tensor], Tensor]) -> Tensor:
    if not dropout.training or dropout.p == 0:
        return x
    return x * take(F.dropout(x.new_ones(shape), dropout.p)).clone()
