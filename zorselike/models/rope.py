"""Rotary position embedding (Su et al. 2021), in Llama's order: neighbouring pairs are rotated.

Tables are computed where they are used and not kept as buffers: that costs next to nothing
beside a layer, and leaves nothing to be rebuilt or moved when a layer is cut out of its model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow frequencies over a longer context."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


def rope_tables(
    x: Tensor, positions: Tensor | None, *, theta: float, scaling: RopeScaling | None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine for `x` `[rows, sequence, heads, head_dim]`, in fp32 or, for fp64, in fp64.

    `positions`: `[rows, sequence]`, or None for 0, 1, 2, ... Both tables are
    `[rows or nothing, sequence, 1, head_dim / 2]`.
    """
    head_dim = x.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=x.device, dtype=dtype) * (-math.log(theta) / head_dim)
    frequencies = exponents.exp()
    if scaling is not None:
        turns = frequencies * (scaling.original_max_seq_len / (2 * math.pi))
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)
    angles = (positions.to(dtype).unsqueeze(-1) * frequencies).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Turns each pair of tensors `[rows, sequence, heads, head_dim]` by its angle; keeps their dtypes."""
    if torch.compiler.is_compiling():  # Which makes one kernel of these, and none of complex numbers.
        pairs = [x.to(cos.dtype).reshape(*x.shape[:-1], -1, 2).unbind(-1) for x in tensors]
        turned = [torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1) for a, b in pairs]
    else:  # Three passes over memory instead of nine.
        table = torch.complex(cos, sin)
        numbers = [
            torch.view_as_complex(x.to(cos.dtype).reshape(*x.shape[:-1], -1, 2).contiguous()) for x in tensors
        ]
        turned = [torch.view_as_real(number * table) for number in numbers]
    return [pair.flatten(-2).to(x.dtype) for pair, x in zip(turned, tensors, strict=True)]
