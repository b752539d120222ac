"""`[training] mixed_precision_param` as a dtype."""

from __future__ import annotations

import torch

from zorselike.runtime.processes.precision import ParamDtype
from zorselike.train.config.config import Config


def find_param_dtype(config: Config) -> ParamDtype:
    """What `HeteroPipeline` is told; None for fp32, in which models are built."""
    name = config.training.mixed_precision_param
    if name in ("auto", "float32"):
        return "auto" if name == "auto" else None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
