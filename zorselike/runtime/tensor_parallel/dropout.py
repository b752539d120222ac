"""Dropout of what is cut, with the masks of one process.

All ranks of a replica begin a layer's microbatch with the same random state (`ministage/random_numbers.py`).
It stays the same, and that of one process, where each draws for the whole of what is dropped from, of which
it has a part.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def drop_of_whole(dropout: nn.Dropout, columns: tuple[int, int], width: int, x: Tensor) -> Tensor:
    """`x`, the columns `[start, stop)` of something so wide, with what one process drops of them dropped."""
    if not dropout.training or dropout.p == 0:
        return x
    mask = F.dropout(x.new_ones((*x.shape[:-1], width)), dropout.p)
    return x * mask[..., slice(*columns)].clone()
