"""Tensors as bytes of a file."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zorselike.errors import ConfigError

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in safetensors; `ConfigError` if it has none there."""
    if dtype not in _NAMES:
        raise ConfigError(f"a tensor of {dtype} cannot be saved; the file format has no such dtype")
    return _NAMES[dtype]


def named_dtype(name: str) -> torch.dtype:
    """The inverse."""
    return _DTYPES[name]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which the caller keeps. (That of a tensor that NumPy has seen
    can no longer be given back by `resize_`.)"""
    if not tensor.nbytes:
        return memoryview(b"")
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
