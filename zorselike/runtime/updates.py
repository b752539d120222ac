"""Optimizer updates: one optimizer a ministage, exact clipping by norm.

Without clipping by the global norm a ministage steps as soon as it is reduced. The global norm
is known only after the last backward, so `max_norm` with `clip="global"` keeps the sharded
gradients and defers all updates; `clip="ministage"` clips each ministage by its own norm at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zorselike.runtime.ministage import ShardedMinistage, local_tensor
from zorselike.runtime.ranks import ProcessGroup

Clip = Literal["global", "ministage"]
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]

_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`, so that clipping equals a single process."""


class Updates:
    """Norms, clipping and optimizers of the ministages of one rank."""

    def __init__(
        self,
        ministages: Mapping[int, ShardedMinistage],
        factory: OptimizerFactory,
        *,
        max_norm: float | None,
        clip: Clip,
        borrowed: frozenset[str],
        counts_replicated: bool,
        device: torch.device,
        world: ProcessGroup,
        own_group: ProcessGroup,
    ) -> None:
        """`counts_replicated`: whether this rank is the one of its group whose whole gradients
        (ZeRO 0) enter the norm; `world` and `own_group` are Gloo groups of this object alone."""
        self._ministages = ministages
        self._max_norm = max_norm
        self._clip = clip
        self._counts_replicated = counts_replicated
        self._device = device
        self._world = world
        self._own_group = own_group
        self._parameters = {
            i: [
                (name, p)
                for name, p in ministage.named_parameters()
                if p.requires_grad and name not in borrowed
            ]
            for i, ministage in ministages.items()
        }
        self.optimizers: dict[int, Optimizer] = {
            i: factory(parameters) for i, parameters in self._parameters.items() if parameters
        }
        self._squares = torch.zeros((), dtype=torch.float64, device=device)
        self._coefficient: float | None = None

    @property
    def defers(self) -> bool:
        """Whether updates wait for the global norm."""
        return self._max_norm is not None and self._clip == "global"

    def begin(self) -> None:
        """Starts a step: no norm yet."""
        self._squares = torch.zeros((), dtype=torch.float64, device=self._device)
        self._coefficient = None

    def squares(self) -> Tensor:
        """Sum of squares of the gradients that this rank answers for, in float64."""
        return self._squares

    def find_global_norm(self) -> None:
        """Sums the squares over all ranks and derives the factor of the deferred updates."""
        for ministage in self._ministages:
            self._squares += self._squares_of(ministage)
        total = self._squares.to("cpu", copy=True)
        dist.all_reduce(total, group=self._world)
        self._coefficient = self._factor(total)

    def step(self, ministage: int) -> None:
        """Clips, updates and drops the gradients of one ministage."""
        if self.defers:
            assert self._coefficient is not None, "NORM comes before deferred updates"
            self._scale(ministage, self._coefficient)
        else:
            squares = self._squares_of(ministage)
            self._squares += squares
            if self._max_norm is not None:
                total = squares.to("cpu", copy=True)
                dist.all_reduce(total, group=self._own_group)
                self._scale(ministage, self._factor(total))
        if ministage in self.optimizers:
            self.optimizers[ministage].step()
        self._ministages[ministage].zero_grad()

    def _factor(self, squares: Tensor) -> float:
        assert self._max_norm is not None
        return min(1.0, self._max_norm / (float(squares.sqrt()) + _EPSILON))

    def _grads(self, ministage: int) -> list[Tensor]:
        return [local_tensor(p.grad) for _, p in self._parameters[ministage] if p.grad is not None]

    def _squares_of(self, ministage: int) -> Tensor:
        grads = self._grads(ministage)
        if not grads or (self._ministages[ministage].is_replicated and not self._counts_replicated):
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.nn.utils.get_total_norm(grads).to(torch.float64).square()

    def _scale(self, ministage: int, factor: float) -> None:
        if factor < 1.0:
            for grad in self._grads(ministage):
                grad.mul_(factor)


class LRSchedulers:
    """One learning-rate scheduler per local optimizer, stepped together."""

    def __init__(
        self, optimizers: Mapping[int, Optimizer], factory: Callable[[Optimizer], LRScheduler]
    ) -> None:
        self.schedulers = {ministage: factory(optimizer) for ministage, optimizer in optimizers.items()}

    def step(self) -> None:
        """Steps every scheduler once."""
        for scheduler in self.schedulers.values():
            scheduler.step()

    def get_last_lr(self) -> list[float]:
        """The learning rates of the first local optimizer's groups; [] on a rank without one."""
        for scheduler in self.schedulers.values():
            return [float(rate) for rate in scheduler.get_last_lr()]
        return []

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """State of each scheduler by ministage."""
        return {ministage: scheduler.state_dict() for ministage, scheduler in self.schedulers.items()}

    def load_state_dict(self, state: Mapping[int, dict[str, Any]]) -> None:
        """Restores what `state_dict` gave."""
        for ministage, scheduler in self.schedulers.items():
            scheduler.load_state_dict(state[ministage])


def default_optimizer(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """AdamW with torch's defaults."""
    return torch.optim.AdamW(list(named_parameters))
