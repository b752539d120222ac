"""The loss of a step: a sum over targets, divided by how many the global batch holds.

Token-normalised over the whole batch, so that no split of the rows changes a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from zorselike.errors import ConfigError
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.model.nested import map_tensors, tensors_in

LossFn = Callable[[Any, Any], Tensor]
CountFn = Callable[[Any], Any]
Unpack = Callable[[Any], Any]

IGNORE_INDEX = -100


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of cross-entropies: logits `[rows, ..., vocabulary]`, targets `[rows, ...]`; -100 is
    ignored. In fp32 at least, whatever the logits' precision. Raises `ConfigError` for other shapes."""
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"the model returns a {type(logits).__name__}, and token cross-entropy takes logits alone; pass "
            "unpack=, a function that takes them out, such as unpack=lambda out: out[0], or loss_fn="
        )
    if logits.shape[:-1].numel() != targets.numel():
        raise ConfigError(
            f"outputs are {list(logits.shape)} and targets {list(targets.shape)}, and token cross-entropy "
            "takes logits [rows, ..., vocabulary] for targets [rows, ...]; let the model return the logits "
            "of all positions, or pass loss_fn="
        )
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


# -- a loss is a sum ------------------------------------------------------------------------

_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-2, torch.float32: 1e-3, torch.float64: 1e-6}
"""Relative to the summed parts: far above round-off, far below what a mean would show."""


def check_additive(
    loss_fn: Callable[[Any, Any], Any],
    count_fn: Callable[[Any], Any],
    outputs: Any,
    targets: Any,
    *,
    over: Literal["rows", "positions"] = "rows",
) -> None:
    """Splits one batch in two and proves that loss and count are sums over rows, or over the positions of the
    sequence.

    `outputs` and `targets`: tensors `[rows, ...]` or `[rows, positions, ...]`, or nested tuples, lists and
    dictionaries of them. One row is taken twice. Raises `ConfigError` otherwise.
    """
    dim = 0 if over == "rows" else 1
    rows = min((t.shape[dim] for t in tensors_in((outputs, targets)) if t.dim() > dim), default=0)
    if rows == 0:
        return
    if rows == 1:
        outputs, targets = map_tensors((outputs, targets), lambda tensor: torch.cat((tensor, tensor), dim))
        rows = 2
    halves = [slice(0, rows // 2), slice(rows // 2, rows)]
    with torch.no_grad():  # Of copies, as a loss may change what it is given.
        loss, count = loss_fn(map_tensors(outputs, torch.clone), targets), count_fn(targets)
        if not isinstance(loss, Tensor) or loss.dim():
            return  # No number, which who takes the loss refuses.
        losses = [loss_fn(_cut(outputs, dim, half), _cut(targets, dim, half)) for half in halves]
        counts = [count_fn(_cut(targets, dim, half)) for half in halves]
    _require_sum("loss_fn", loss, losses, f"{rows} {over}")
    _require_sum("count_fn", count, counts, f"{rows} {over}")


def _cut(value: Any, dim: int, part: slice) -> Any:
    return map_tensors(value, lambda tensor: tensor[(slice(None),) * dim + (part,)].clone())


def _require_sum(what: str, whole: Any, split: Sequence[Any], whole_size: str) -> None:
    dtype = whole.dtype if isinstance(whole, Tensor) else torch.float64
    values = [float(value) for value in (whole, *split)]
    if not all(abs(value) < float("inf") for value in values):  # also false for NaN
        return
    total, parts = values[0], values[1:]
    if abs(total - sum(parts)) > _TOLERANCE.get(dtype, 0.0) * sum(map(abs, parts)):
        mend = (
            "sum over rows and tokens (reduction='sum'); the mean is taken over the global batch"
            if what == "loss_fn"
            else "return how many targets the loss sums over"
        )
        raise ConfigError(
            f"{what} is not additive over {whole_size.split()[1]}: {total:g} for {whole_size}, but "
            f"{' + '.join(f'{part:g}' for part in parts)} for their halves; {mend}"
        )
