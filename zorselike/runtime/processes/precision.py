"""In which precision a job computes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from zorselike.runtime.processes.world import ProcessInfo

ParamDtype = torch.dtype | Literal["auto"] | None

_FIRST_WITH_BF16 = 80
"""Compute capability (Ampere) from which on matrix units multiply bf16."""


def choose_dtype(wanted: ParamDtype, processes: Sequence[ProcessInfo]) -> torch.dtype | None:
    """The dtype of all ranks: what is wanted, "auto" replaced by what every card can do."""
    if wanted != "auto":
        assert not isinstance(wanted, str)
        return wanted
    return torch.float16 if any(map(_lacks_bf16, processes)) else torch.bfloat16


def computes_in_fp16(model: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether gradients may overflow, so that losses are scaled."""
    return torch.float16 in {dtype or p.dtype for p in model.parameters() if p.requires_grad}


def _lacks_bf16(process: ProcessInfo) -> bool:
    capability = re.fullmatch(r"sm_(\d+)", process.architecture)
    return capability is not None and int(capability[1]) < _FIRST_WITH_BF16
