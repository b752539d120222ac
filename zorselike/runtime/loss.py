"""The loss of a step: a sum over targets, divided by how many the global batch holds.

Token-normalised over the whole batch, so that no split of the rows changes a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from zorselike.errors import ConfigError
from zorselike.runtime.comm.ranks import ProcessGroup

LossFn = Callable[[Any, Any], Tensor]
CountFn = Callable[[Any], Any]
Unpack = Callable[[Any], Any]

IGNORE_INDEX = -100


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of cross-entropies: logits `[rows, ..., vocabulary]`, targets `[rows, ...]`; -100 is
    ignored. In fp32 at least, whatever the logits' precision."""
    logits = logits.flatten(0, -2)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def count_valid_tokens(targets: Tensor) -> Tensor:
    """Number of targets that are not ignored; raises `ConfigError` for what is no tensor."""
    if not isinstance(targets, Tensor):
        raise ConfigError(
            f"targets is a {type(targets).__name__}, in which valid targets are not counted by themselves; "
            "pass count_fn, which returns how many targets loss_fn sums over"
        )
    return (targets != IGNORE_INDEX).sum()


def count_targets(count_fn: CountFn, targets: Any) -> float:
    """What `count_fn` counts; raises `ConfigError` where that is no number of targets."""
    count = count_fn(targets)
    is_one = isinstance(count, Real) or (isinstance(count, Tensor) and count.numel() == 1)
    number = float(count) if is_one else math.nan
    if 0 <= number < math.inf:
        return number
    raise ConfigError(
        "count_fn must return one number, how many targets loss_fn sums over; it returned "
        f"{f'{number:g}' if is_one else _show(count)}"
    )


class Loss:
    """Loss of one step as the last ministage's ranks add it up."""

    def __init__(
        self,
        loss_fn: LossFn,
        *,
        num_targets: float,
        device: torch.device,
        group: ProcessGroup | None,
        forbid_nonfinite: bool,
        scale: float = 1.0,
    ) -> None:
        """`num_targets`: this rank's count; `group`: the last ministage's ranks (Gloo), None
        elsewhere. The global count is summed while the pipeline fills. `scale`: what gradients, not
        losses, are multiplied by."""
        self._loss_scale = scale
        self._loss_fn = loss_fn
        self._forbid_nonfinite = forbid_nonfinite
        self._device = device
        self._losses: dict[int, Tensor] = {}
        self.local_targets = num_targets
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._global_targets = torch.tensor(num_targets, dtype=torch.float64, device="cpu")
        self._work = (
            None if group is None else dist.all_reduce(self._global_targets, group=group, async_op=True)
        )
        self._scale: Tensor | None = None

    def add(self, outputs: Any, targets: Any, number: int) -> Tensor:
        """The loss sum of one microbatch."""
        loss = self._loss_fn(outputs, targets)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise ConfigError(
                "loss_fn must return one number, the sum of the losses (reduction='sum'); "
                f"it returned {_show(loss)}"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ConfigError(
                "loss_fn returned a loss without a gradient, from which nothing can train; do not detach the "
                "outputs, and return outputs.sum() * 0 where no target counts"
            )
        if loss.dtype is torch.float16:
            loss = loss.float()  # The scaled gradient of a loss in fp16 would overflow at once.
        self._losses[number] = loss
        self.loss_sum += loss.detach()
        if self._forbid_nonfinite and not bool(torch.isfinite(loss)):
            raise FloatingPointError(f"the loss is {float(loss)}")
        return loss

    def grad(self, number: int) -> Tensor:
        """Gradient of a microbatch's loss sum: one over the global count, times the loss scale."""
        loss = self._losses.pop(number)
        if self._scale is None:
            if self._work is not None:
                self._work.wait()
            total = float(self._global_targets)
            scale = self._loss_scale / total if total else 0.0
            self._scale = torch.full((), scale, dtype=loss.dtype, device=self._device)
        return self._scale

    def finish(self) -> None:
        """Waits for the count where no backward did."""
        if self._scale is None and self._work is not None:
            self._work.wait()


def _show(loss: Any) -> str:
    return f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
