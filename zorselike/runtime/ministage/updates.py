"""Optimizer updates: one optimizer a ministage, exact clipping by norm, loss scaling.

A ministage steps as soon as it is reduced, on a stream of its own beside the next one's backward.
Two things are known only after the last backward, and defer all updates until then: the global
norm (`max_norm` with `clip="global"`), and with fp16 whether every gradient of the step is finite.
`clip="ministage"` clips each ministage by its own norm.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zorselike.errors import ConfigError
from zorselike.runtime._compat import counting_on_host
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.ministage.ministage import ShardedMinistage
from zorselike.runtime.ministage.norm_sums import NormGroup, NormSums, Total
from zorselike.runtime.ministage.optimizer_state import ELEMENTWISE

Clip = Literal["global", "ministage"]
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]

_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`, so that clipping equals a single process."""


INITIAL = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000
"""Good steps in a row after which the scale grows (these are `GradScaler`'s defaults)."""


class LossScale:
    """Dynamic loss scaling for fp16, in the manner of `torch.amp.GradScaler`.

    Losses are multiplied so that small gradients do not vanish in fp16. A step in which a gradient
    overflows changes nothing, on any rank, and halves the scale; many good steps in a row double it.
    Every rank sees the same global norm, and so has the same scale.
    """

    def __init__(self, value: float = INITIAL) -> None:
        self.value = value
        """Factor of the next step's losses."""
        self.value_of_step = value
        """Factor of this step's losses."""
        self._num_good = 0

    def begin(self) -> None:
        """Starts a step."""
        self.value_of_step = self.value

    def update(self, *, overflowed: bool) -> None:
        """Once it is known whether all gradients of a step are finite."""
        if overflowed:
            self.value *= BACKOFF
            self._num_good = 0
            return
        self._num_good += 1
        if self._num_good == GROWTH_INTERVAL:
            self.value *= GROWTH
            self._num_good = 0

    def state_dict(self) -> dict[str, float]:
        """What the next step depends on."""
        return {"value": self.value, "num_good": self._num_good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores what `state_dict` gave."""
        self.value, self._num_good = state["value"], int(state["num_good"])


class Updates:
    """Norms, clipping and optimizers of the ministages of one rank."""

    def __init__(
        self,
        ministages: Mapping[int, ShardedMinistage],
        factory: OptimizerFactory,
        *,
        max_norm: float | None,
        clip: Clip,
        scale: LossScale | None,
        counts_replicated: bool,
        are_cut: bool,
        memory: Memory,
        world: NormGroup,
        group: NormGroup,
    ) -> None:
        """`counts_replicated`: whether this rank is the one of its group whose whole gradients
        (ZeRO 0) enter the norm; `are_cut`: whether ranks have pieces of weights; `world` and `group`: all
        ranks, and those of this rank's group. `scale`: what losses are multiplied by, with fp16."""
        self._ministages = ministages
        self._max_norm = max_norm
        self._clip = clip
        self._counts_replicated = counts_replicated
        self._device, self._streams = memory.device, memory.streams
        # An optimizer cannot be told by the device to do nothing.
        self._sums = NormSums(memory, decides=scale is not None)
        self._world = world
        self._group = group
        self._scale = scale
        self._defers = defers_updates(max_norm, clip, scale)
        self.optimizers: dict[int, Optimizer] = {
            i: _make(factory, i, ministage) for i, ministage in ministages.items() if ministage.trained
        }
        for i, optimizer in self.optimizers.items():
            _refuse(optimizer, ministages[i])
            if are_cut:
                _refuse_for_pieces(optimizer, ministages[i])
            ministages[i].train_by(optimizer)
        self.begin()

    def begin(self) -> None:
        """Starts a step: no norm yet."""
        if self._scale is not None:
            self._scale.begin()
        self._squares_of: dict[int, Tensor] = {}
        self._total: Total | None = None
        """Of a global norm."""
        self._totals: list[Total] = []
        """Of ministages: kept, since updates read them on another stream than they were made on."""
        self._is_scale_updated = False

    def squares(self) -> Tensor:
        """Sum of squares of the gradients that this rank answers for, in float64 and unscaled."""
        total = self._sum_squares()
        if self._scale is None:
            return total
        self._update_scale()
        return total / self._scale.value_of_step**2

    def _sum_squares(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for ministage in self._ministages:  # In one order, whenever each was measured.
            if ministage in self._squares_of:
                total = total + self._squares_of[ministage]
        return total

    @property
    def is_skipped(self) -> bool:
        """Whether no update of this step takes place: a gradient of it overflowed on some rank."""
        return self._scale is not None and self._total is not None and not bool(self._total.read().isfinite())

    def measure(self, ministage: int) -> None:
        """Takes the squares of a ministage's final gradients, which are on the device."""
        if ministage in self._squares_of:
            return
        with self._ministages[ministage].gradients.ready_on.use():
            self._squares_of[ministage] = self._measure_now(ministage)

    def _measure_now(self, ministage: int) -> Tensor:
        owner = self._ministages[ministage]
        grads = self._grads(ministage, lambda name: owner.answers_for(name, of_whole=self._counts_replicated))
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        # An overflow of the norm itself must not look like one of the gradients.
        return torch.nn.utils.get_total_norm(grads).to(torch.float64).square()

    def find_global_norm(self) -> None:
        """Sums the squares over all ranks; deferred updates need it."""
        for number, ministage in self._ministages.items():
            self.measure(number)
            ministage.await_reduction()
        self._total = self._sums.start(self._sum_squares(), self._world, self._streams.compute)

    def _update_scale(self) -> None:
        if self._scale is not None and self._total is not None and not self._is_scale_updated:
            self._scale.update(overflowed=self.is_skipped)
            self._is_scale_updated = True

    def step(self, ministage: int) -> None:
        """Clips, updates and drops the gradients of one ministage."""
        owner = self._ministages[ministage]
        if self._defers:
            assert self._total is not None, "NORM comes before deferred updates"
            self._update_scale()
            total = self._total
        else:
            self.measure(ministage)
            total = None
        if self._max_norm is not None and self._clip == "ministage":
            # Not on compute, which would wait for the reduction.
            squares, ready_on = self._squares_of[ministage], owner.gradients.ready_on
            total = self._sums.start(squares, self._group, ready_on)
            self._totals.append(total)
        with owner.updating():
            if ministage in self.optimizers and not self.is_skipped:
                factor = self._factor(total)
                if isinstance(factor, Tensor) or factor != 1.0:
                    for grad in self._grads(ministage):
                        grad.mul_(factor)
                optimizer = self.optimizers[ministage]
                with counting_on_host(optimizer):
                    optimizer.step()

    def _factor(self, total: Total | None) -> float | Tensor:
        """What gradients are multiplied by: the clipping, and the inverse of the loss scale. A number, or on
        the device where the norm is there."""
        unscaling = 1.0 if self._scale is None else 1.0 / self._scale.value_of_step
        if self._max_norm is None:
            return unscaling
        assert total is not None
        squares = total.read()
        if total.is_on_device:
            return (torch.full_like(squares, self._max_norm) / (squares.sqrt() + _EPSILON)).clamp(max=1.0)
        norm = math.sqrt(float(squares)) * unscaling
        return min(self._max_norm / (norm + _EPSILON), 1.0) * unscaling

    def close(self) -> None:
        """Ends the thread that sums, if there is one."""
        self._sums.close()

    def abandon(self) -> None:
        """The same, without waiting for other ranks."""
        self._sums.abandon()

    def _grads(self, ministage: int, takes: Callable[[str], bool] = lambda _: True) -> list[Tensor]:
        owner = self._ministages[ministage]
        return [owner.gradients.local(n) for n in owner.trained if owner.gradients.has(n) and takes(n)]


def defers_updates(max_norm: float | None, clip: Clip, scale: object | None) -> bool:
    """Whether updates wait until all gradients of the step are there."""
    return scale is not None or (max_norm is not None and clip == "global")


def _make(factory: OptimizerFactory, index: int, ministage: ShardedMinistage) -> Optimizer:
    """Raises `ConfigError` for groups of pairs one of which is empty here: torch takes it for one of
    parameters alone, and refuses both together."""
    try:
        return factory([(ministage.whole_name(name), own) for name, own in ministage.trained.items()])
    except ValueError as error:
        if "with/without names" not in str(error):
            raise
        raise ConfigError(
            f"optimizer: of its groups for ministage {index} some have (name, parameter) pairs and others do "
            "not, or are empty there, which torch does not take together: make groups of parameters alone"
        ) from error


def _refuse(optimizer: Optimizer, ministage: ShardedMinistage) -> None:
    """Raises `ConfigError` for what is no optimizer, or none of these parameters, evaluates the model itself,
    or cannot step on shards."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer: what was given for it returned a {type(optimizer).__name__}, and no "
            "torch.optim.Optimizer of the parameters"
        )
    trained = ministage.trained.values()
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Who filters parameters may have put something else in place of none.
    looks_alike = {*(own.shape for own in trained)} & {*(own.shape for own in held)}
    if looks_alike and not {*map(id, trained)} & {*map(id, held)}:
        raise ConfigError(
            f"optimizer: the {type(optimizer).__name__} that was made has none of the parameters that it was "
            "given: make it of the argument, (name, parameter) pairs of this rank's shards, and not of the "
            "model's own, which are not trained"
        )
    if isinstance(optimizer, torch.optim.Adafactor):
        raise ConfigError(
            "optimizer: torch.optim.Adafactor does not step on sharded parameters; use torch.optim.AdamW, "
            "whose state can be offloaded"
        )
    parameters = inspect.signature(optimizer.step).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(p.default is p.empty and p.kind not in variadic for p in parameters):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__}.step needs a closure that evaluates the model again, "
            "which a pipeline cannot; use one that steps on gradients, such as torch.optim.AdamW"
        )


def _refuse_for_pieces(optimizer: Optimizer, ministage: ShardedMinistage) -> None:
    """Raises `ConfigError` for one that may look at a weight as a whole, of which ranks have pieces, and for
    one that was given some pieces of a weight and not others."""
    kind = type(optimizer)
    if kind not in {*ELEMENTWISE, torch.optim.Adagrad} and not getattr(kind, "is_elementwise", False):
        raise ConfigError(
            f"optimizer: {kind.__name__} may look at weights as a whole, and ranks of tensor-parallel "
            "replicas have pieces of them; use one such as torch.optim.AdamW, a plan without replicas, or, "
            "if to its update no element of a weight matters to another, say so: "
            f"{kind.__name__}.is_elementwise = True"
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    pieces: dict[str, set[bool]] = {}
    for name, parameter in ministage.trained.items():
        pieces.setdefault(ministage.whole_name(name), set()).add(id(parameter) in held)
    for name, are_held in pieces.items():
        if len(are_held) > 1:
            raise ConfigError(
                f"optimizer: it was given some pieces of '{name}' and not others; this rank has several, "
                "each with that name: make groups of a list of pairs, not of a dictionary"
            )


def default_optimizer(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """AdamW with torch's defaults, but for the kernel: on GPUs the fused one, which reads everything once."""
    is_on_gpu = all(parameter.is_cuda for _, parameter in named_parameters)
    return torch.optim.AdamW(list(named_parameters), fused=is_on_gpu or None)
