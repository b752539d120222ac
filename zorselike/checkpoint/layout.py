"""Names and constants of a checkpoint's files.

    step-00001200/ manifest.json
                   model/rank-00003.safetensors
                   optim/rank-00003.safetensors

A folder of checkpoints holds such folders. Beside them lie, under the name of a step and a suffix, what a
writer has not finished (`.partial-`), what is being deleted (`.removed-`), and what made room for another
(`.replaced-`); nothing reads these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from zorselike.plan.holdings import VALUE

MANIFEST = "manifest.json"
LEASE = "lease.json"

CHUNK_BYTES = 4 * 2**20
"""Bytes of a tensor's slice that have one checksum, the last ones fewer: the two ends of a range together
cost at most twice as many bytes more than were asked for."""

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "U16": 2,
        "I16": 2,
        "F16": 2,
        "BF16": 2,
        "U32": 4,
        "I32": 4,
        "F32": 4,
        "U64": 8,
        "I64": 8,
        "F64": 8,
    }
)
"""Bytes of an element, by the name of its dtype in safetensors."""

_STEP = re.compile(r"step-([0-9]{8,})")
_MODEL = re.compile(r"model-step-[0-9]{8,}")
_BESIDE = re.compile(r"step-([0-9]{8,})\.(partial|removed|replaced)-[0-9a-f]+")
_SLICES = re.compile(r"(model|optim)/rank-[0-9]{5,}(-[0-9]+)?\.safetensors")


def step_folder(step: int) -> str:
    return f"step-{step:08}"


def model_folder(step: int) -> str:
    """Of a model that a run has handed on: whole tensors, beside the checkpoints."""
    return f"model-{step_folder(step)}"


def is_model_folder(name: str) -> bool:
    return _MODEL.fullmatch(name) is not None


def partial_folder(step: int, token: str) -> str:
    return f"{step_folder(step)}.partial-{token}"


def slices_file(part: Literal["model", "optim"], rank: int, place: int = 0) -> str:
    """Inside a step's folder. A file has one slice of a tensor: where a rank has several, as it may have
    several pieces, the others are in files of further places."""
    return f"{part}/rank-{rank:05}{f'-{place}' if place else ''}.safetensors"


def is_slices_file(file: str) -> bool:
    """Whether a file has such a name; others, such as `../x`, are not touched."""
    return _SLICES.fullmatch(file) is not None


def step_of(name: str) -> int | None:
    """The step of a committed folder's name; None for other names."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def leftover_of(name: str) -> tuple[int, str] | None:
    """Step, and `partial`, `removed` or `replaced`, of a folder that is beside committed ones."""
    match = _BESIDE.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def entry_name(name: str, kind: str) -> str:
    """Under which a tensor is in a safetensors file."""
    return name if kind == VALUE else f"{kind}.{name}"
