"""The model that a recipe names, and the dtype in which its layers compute."""

from __future__ import annotations

import torch

from zorselike.models import Decoder, build_model
from zorselike.runtime.processes.device import ParamDtype
from zorselike.train.config.config import Config


def build_on_meta(config: Config) -> Decoder:
    """The model of `[model]`, without memory."""
    with torch.device("meta"):
        return build_model(config.model.name, config.model.flavor)


def find_param_dtype(config: Config) -> ParamDtype:
    """`[training] mixed_precision_param` as `HeteroPipeline` takes it; None for fp32, in which models are
    built."""
    name = config.training.mixed_precision_param
    if name in ("auto", "float32"):
        return "auto" if name == "auto" else None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
