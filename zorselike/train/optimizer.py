"""The optimizer of a ministage, AdamW or Adam without weight decay of norms and biases, and its learning
rates over a run: warm-up, stable, decay, with the factors of TorchTitan
(`torchtitan/components/lr_scheduler.py`, v0.2.2)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from zorselike.train.config.config import LRScheduler as LRSchedulerConfig
from zorselike.train.config.config import Optimizer as OptimizerConfig

NamedParameters = list[tuple[str, nn.Parameter]]

_CLASSES: dict[str, type[torch.optim.Adam]] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}
_FUSED_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})

logger = logging.getLogger("zorselike")


def build_optimizer_factory(config: OptimizerConfig) -> Callable[[NamedParameters], torch.optim.Optimizer]:
    """The factory that `HeteroPipeline` calls for each ministage with `[(global name, parameter)]`."""

    def build(named_parameters: NamedParameters) -> torch.optim.Optimizer:
        groups = group_by_decay(named_parameters, weight_decay=config.weight_decay)

        implementation = config.implementation
        if implementation == "fused" and not all(has_fused_kernel(p) for _, p in named_parameters):
            logger.info('[optimizer] implementation = "foreach", since this device has no fused kernels')
            implementation = "foreach"
        return _CLASSES[config.name](
            groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=implementation == "fused",
            foreach=implementation == "foreach",
        )

    return build


def has_fused_kernel(parameter: torch.Tensor) -> bool:
    """Whether torch (from 2.11) has a fused kernel for it; torch itself says so only at the first step."""
    return parameter.device.type in _FUSED_DEVICES and parameter.is_floating_point()


def group_by_decay(
    named_parameters: Sequence[tuple[str, nn.Parameter]], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer, with names; empty groups are left out."""
    groups = (
        ([(name, p) for name, p in named_parameters if is_decayed(name, p)], weight_decay),
        ([(name, p) for name, p in named_parameters if not is_decayed(name, p)], 0.0),
    )
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """True for matrices; false for vectors, biases and parameters of norms."""
    *owners, leaf = name.split(".")
    return parameter.ndim >= 2 and leaf != "bias" and not any("norm" in owner.lower() for owner in owners)


# -- learning rates ---------------------------------------------------------------------------


@dataclass(frozen=True)
class WarmupStableDecay:
    """Factor on the optimizer's learning rate, as a function of the number of finished steps."""

    warmup_steps: int
    stable_steps: int
    decay_steps: int
    decay_type: Literal["linear", "sqrt", "cosine"]
    min_lr_factor: float

    @classmethod
    def of(cls, config: LRSchedulerConfig, *, steps: int) -> WarmupStableDecay:
        """The schedule of a run of `steps`; a warm-up or decay that is too long is shortened."""
        total = config.total_steps if config.total_steps is not None else steps
        warmup = min(config.warmup_steps, total)
        decay = total - warmup
        if config.decay_ratio is not None:
            decay = min(decay, round(total * config.decay_ratio))
        # One more than is left, so that the last step does not get the factor at the end of the decay.
        return cls(warmup, total + 1 - warmup - decay, decay, config.decay_type, config.min_lr_factor)

    def __call__(self, step: int) -> float:
        """Factor of the step after `step` steps; after the schedule's end that of the end of the decay."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        first = self.warmup_steps + self.stable_steps
        if step < first or self.decay_steps == 0:
            return 1.0
        progress = min((step + 1 - first) / self.decay_steps, 1.0)
        match self.decay_type:
            case "linear":
                left = 1 - progress
            case "sqrt":
                left = 1 - math.sqrt(progress)
            case "cosine":
                left = 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_factor + (1 - self.min_lr_factor) * left


def log_schedule(config: LRSchedulerConfig, *, steps: int) -> None:
    """Logs where a warm-up is shortened, and where the schedule is over before a run of `steps` is."""
    rate = WarmupStableDecay.of(config, steps=steps)
    if rate.warmup_steps < config.warmup_steps:
        logger.info(
            "[lr_scheduler] warmup_steps = %d is shortened to the %d steps of the schedule ([training] "
            "steps, or total_steps)",
            config.warmup_steps,
            rate.warmup_steps,
        )
    if config.total_steps is not None and config.total_steps < steps:
        logger.info(
            "[lr_scheduler] total_steps = %d ends before [training] steps = %d: every step after it has %g "
            "times the learning rate",
            config.total_steps,
            steps,
            rate(steps),
        )


def build_lr_scheduler_factory(
    config: LRSchedulerConfig, *, steps: int, steps_before: int = 0
) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    """The factory that `HeteroPipeline.lr_schedulers` calls for each ministage's optimizer, after so many
    steps of the schedule."""
    factor = WarmupStableDecay.of(config, steps=steps)

    def build(optimizer: torch.optim.Optimizer) -> LRScheduler:
        for group in optimizer.param_groups:  # As torch wants it of a schedule that goes on.
            group["initial_lr"] = group["lr"]
        return LambdaLR(optimizer, factor, last_epoch=steps_before - 1)

    return build
