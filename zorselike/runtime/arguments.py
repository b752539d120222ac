"""Arguments of `HeteroPipeline`: what is refused, and what some stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zorselike.errors import ConfigError
from zorselike.plan.plan import Plan
from zorselike.runtime.ministage.gradients import HALF
from zorselike.runtime.processes.device import ParamDtype
from zorselike.runtime.processes.world import ProcessInfo


def find_patience(processes: Sequence[ProcessInfo]) -> float:
    """Seconds of silence after which a rank of this job is taken for stopped."""
    return max(30.0 if process.device == "cuda" else 5.0 for process in processes)


def check_arguments(max_norm: float | None, clip: str, param_dtype: ParamDtype, optimizer: object) -> None:
    if optimizer is not None and not callable(optimizer):
        kind = type(optimizer).__name__
        raise ConfigError(
            f"optimizer is an {kind}; give what makes one of a ministage's parameters, such as "
            f"functools.partial(torch.optim.{kind}, lr=3e-4)"
        )
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm = {max_norm} clips nothing; give a number above 0, or None")
    if clip not in ("global", "ministage"):
        raise ConfigError(f"clip = '{clip}' is neither 'global' nor 'ministage'")
    if param_dtype not in (None, "auto", torch.float32, torch.float64, *HALF):
        raise ConfigError(
            f'param_dtype = {param_dtype!r}; give torch.bfloat16, torch.float16, "auto", or None'
        )


def refuse_with_replicas(plan: Plan, *, dynamic_shapes: bool) -> None:
    """Raises `ConfigError` for what tensor-parallel replicas cannot do."""
    if plan.has_replicas and dynamic_shapes:
        raise ConfigError(
            "dynamic_shapes=True does not work with tensor-parallel replicas: their schedule says which "
            "positions of rows of the plan's sequence_length each rank sends; pad rows to that length, or "
            "list single ranks in the plan"
        )
