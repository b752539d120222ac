"""Values of any dtype as numpy arrays and back, bfloat16 by its bits: numpy has none."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from zorselike.errors import CheckpointError

FLOATS = ("F64", "F32", "BF16", "F16")
"""Dtypes that are converted into each other."""

_ARRAYS: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "<u1",
        "U8": "<u1",
        "I8": "<i1",
        "U16": "<u2",
        "I16": "<i2",
        "F16": "<f2",
        "BF16": "<u2",
        "U32": "<u4",
        "I32": "<i4",
        "F32": "<f4",
        "U64": "<u8",
        "I64": "<i8",
        "F64": "<f8",
    }
)
_QUIET_NAN = 0x7FC0


def decode(content: NDArray[np.uint8], dtype: str) -> NDArray[np.generic]:
    """The values of bytes; those of bfloat16 as float32. Raises `CheckpointError` for float8."""
    if dtype not in _ARRAYS:
        raise CheckpointError(f"values of {dtype} can be neither converted nor compared here")
    array: NDArray[np.generic] = content.view(_ARRAYS[dtype])
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array


def encode(values: NDArray[np.generic], dtype: str) -> NDArray[np.uint8]:
    """The bytes of values in one of `FLOATS`, rounded to the nearest, ties to even, over float32 as torch
    does it."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "F64":
            return values.astype("<f8").view(np.uint8)
        single = values.astype("<f4")
        if dtype == "F32":
            return single.view(np.uint8)
        if dtype == "F16":
            return single.astype("<f2").view(np.uint8)
    bits = single.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    rounded[np.isnan(single)] = _QUIET_NAN
    return rounded.astype("<u2").view(np.uint8)
