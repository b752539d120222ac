"""zorselike: training on mixed GPUs with PyTorch, every card with the share it can carry.

Plans need no torch; what does is imported when first asked for. What CUDA and its allocator read from the
environment when they start is set here, where the user has not.
"""

from __future__ import annotations

import os
import platform
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zorselike.plan import ConfigError, Group, Microbatch, Ministage, Plan, PlanError
from zorselike.version import __version__

if TYPE_CHECKING:
    from zorselike.elastic.pipeline import ElasticPipeline
    from zorselike.runtime.auxiliary_loss import add_loss
    from zorselike.runtime.model.decoder_cut import list_modules
    from zorselike.runtime.model.initialize import initialize
    from zorselike.runtime.model.signature import Broadcast
    from zorselike.runtime.pipeline import HeteroPipeline

__all__ = [
    "Broadcast",
    "ConfigError",
    "ElasticPipeline",
    "Group",
    "HeteroPipeline",
    "Microbatch",
    "Ministage",
    "Plan",
    "PlanError",
    "__version__",
    "add_loss",
    "initialize",
    "list_modules",
]

# Streams share hardware queues: with the usual 8 a receive that waits for its sender holds back our copies.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Its name until torch 2.9; and WSL's drivers refuse some of what these segments need.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and "microsoft" not in platform.release().lower():
    # Segments of fixed size that no longer fit are given back with `cudaFree`, which waits for all streams.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

_WITH_TORCH = {
    "Broadcast": "zorselike.runtime.model.signature",
    "ElasticPipeline": "zorselike.elastic.pipeline",
    "HeteroPipeline": "zorselike.runtime.pipeline",
    "add_loss": "zorselike.runtime.auxiliary_loss",
    "initialize": "zorselike.runtime.model.initialize",
    "list_modules": "zorselike.runtime.model.decoder_cut",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module 'zorselike' has no attribute '{name}'")
