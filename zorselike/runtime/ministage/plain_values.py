"""Values that optimizers and learning-rate schedulers keep, as JSON can say them, and back."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from zorselike.errors import ConfigError


def to_plain(value: Any, what: str, *, advice: str) -> Any:
    """Raises `ConfigError`, which names `what`, for what `from_plain` could not give back equal."""
    if isinstance(value, Tensor) and value.numel() == 1:
        number = to_plain(value.item(), what, advice=advice)
        return {"tensor": str(value.dtype).removeprefix("torch."), "value": number}
    if isinstance(value, Counter):
        return {"counter": [[to_plain(key, what, advice=advice), count] for key, count in value.items()]}
    if isinstance(value, list | tuple):
        return [to_plain(entry, what, advice=advice) for entry in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"mapping": {key: to_plain(entry, what, advice=advice) for key, entry in value.items()}}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{what} is a {type(value).__name__}, which a checkpoint cannot hold; {advice}")


def from_plain(value: Any) -> Any:
    """What was given to `to_plain`, but a list for a tuple."""
    if isinstance(value, list | tuple):
        return [from_plain(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(from_plain(value["value"]), dtype=getattr(torch, value["tensor"]), device="cpu")
    if "counter" in value:
        return Counter({from_plain(key): count for key, count in value["counter"]})
    if "float" in value:
        return float(value["float"])
    return {key: from_plain(entry) for key, entry in value["mapping"].items()}
