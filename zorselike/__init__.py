"""zorselike: training on mixed GPUs with PyTorch, every card with the share it can carry.

Plans need no torch; what does is imported when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zorselike.plan import ConfigError, Group, Microbatch, Ministage, Plan, PlanError
from zorselike.version import __version__

if TYPE_CHECKING:
    from zorselike.runtime.model.initialize import initialize
    from zorselike.runtime.model.signature import Broadcast
    from zorselike.runtime.pipeline import HeteroPipeline

__all__ = [
    "Broadcast",
    "ConfigError",
    "Group",
    "HeteroPipeline",
    "Microbatch",
    "Ministage",
    "Plan",
    "PlanError",
    "__version__",
    "initialize",
]

_WITH_TORCH = {
    "Broadcast": "zorselike.runtime.model.signature",
    "HeteroPipeline": "zorselike.runtime.pipeline",
    "initialize": "zorselike.runtime.model.initialize",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module 'zorselike' has no attribute '{name}'")
