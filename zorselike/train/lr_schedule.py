"""Learning rates over a run: warm-up, stable, decay, with the factors of TorchTitan
(`torchtitan/components/lr_scheduler.py`, v0.2.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from zorselike.train.config.config import LRScheduler as LRSchedulerConfig


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
        """Factor of the step after `step` steps; after the schedule's end that of its last step."""
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


def build_lr_scheduler_factory(
    config: LRSchedulerConfig, *, steps: int
) -> Callable[[Optimizer], LRScheduler]:
    """The factory that `HeteroPipeline.lr_schedulers` calls for each ministage's optimizer."""
    factor = WarmupStableDecay.of(config, steps=steps)
    return lambda optimizer: LambdaLR(optimizer, factor)
