"""Times of layers on a rank that computes by itself, as a step runs them.

Alone and again and again, a layer of a few milliseconds finds its weights in the processor's caches, and none
of what the thread does for each FSDP unit. So several copies of it run one after the other in the runtime's
own ministage, some microbatches forward and then backward, with gradients that add up. A device neither
waits for that thread nor has such caches: there layers are timed by themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zorselike.plan.plan import Group, Microbatch, Recompute
from zorselike.profiler.clock import Clock, trimmed_mean
from zorselike.profiler.layers.probes import (
    LayerProbe,
    MeasuredModel,
    ProbeTensor,
    make_inputs,
    materialise,
)
from zorselike.profiler.layers.row_search import TrialResult
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.loss import LossFn
from zorselike.runtime.ministage.ministage import ShardedMinistage
from zorselike.runtime.ministage.settings import MinistageSettings, RankResources
from zorselike.runtime.model.nested import map_leaves, tensors_in

NUM_COPIES = 4
MICROBATCHES = 2
LONGEST_S = 0.05
"""Forward and backward of a layer for which neither caches nor what a unit costs matter any more."""


class LayersInStep:
    """A ministage of copies of one layer."""

    def __init__(
        self,
        model: MeasuredModel,
        probe: LayerProbe,
        *,
        device: torch.device,
        alone: ProcessGroup,
        recompute: Recompute,
    ) -> None:
        """`alone`: this rank by itself."""
        self._probe, self._device, self._num_tokens = probe, device, model.num_tokens
        self._clock = Clock(device)
        layer = model.build().get_submodule(probe.module).to(dtype=model.dtype)
        # Copies of what a model has once come after each other as well: what a ministage costs by itself is
        # shared between them, and counted by actions.
        layers = nn.ModuleDict({str(i): copy.deepcopy(layer) for i in range(NUM_COPIES)})
        self.copies = _Copies(layers, probe.inputs, model.loss_fn if probe.is_last else None, self._clock)
        settings = MinistageSettings(
            group=Group(ranks=(0,), microbatches=(Microbatch(0, 0, 1),), zero=2, recompute=recompute),
            mesh=DeviceMesh.from_group(alone, device.type, mesh_dim_names=("dp",)),
            materialise=lambda module, _: materialise(module.train(), device),
            receives_grad=probe.carries_grad,
        )
        names = [f"layers.{i}" for i in range(NUM_COPIES)]
        self._ministage = ShardedMinistage(0, self.copies, names, settings, RankResources.of(device))
        self._ministage.warm_up()
        self._ministage.unshard()

    @staticmethod
    def matters(alone: TrialResult) -> bool:
        """Whether to time it, given what one layer alone took: it has a backward, is short, and all copies
        fit."""
        is_short = alone.forward_s + alone.backward_s < LONGEST_S
        fits = NUM_COPIES * MICROBATCHES * alone.peak_bytes < alone.limit_bytes
        return alone.backward_s > 0 and is_short and fits

    def time(self, rows: int, *, repeats: int, warmups: int = 1) -> tuple[float, float]:
        """Mean seconds of a forward and a backward of one layer with so many rows."""
        batches = [
            make_inputs(self._probe, rows, num_tokens=self._num_tokens, device=self._device)
            for _ in range(MICROBATCHES)
        ]
        times = [self._run(batches) for _ in range(warmups + repeats)][warmups:]
        forward_s = [seconds for forward, _ in times for seconds in forward]
        backward_s = [seconds for _, backward in times for seconds in backward]
        return trimmed_mean(forward_s) / NUM_COPIES, trimmed_mean(backward_s) / NUM_COPIES

    def _run(
        self, batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> tuple[list[float], list[float]]:
        """Seconds of the forward and of the backward of each microbatch."""
        forward_s, grads = [], []
        for number, (inputs, kwargs) in enumerate(batches):
            tensors = tuple(tensors_in(inputs))
            carries = [tensor.requires_grad for tensor in tensors]
            outputs = self._ministage.forward(number, tensors, carries, kwargs, train=True)
            forward_s.append(self.copies.seconds)
            self._ministage.keep_outputs(number, outputs)
            grads.append([torch.ones_like(output) for output in outputs])
            del outputs
        backward_s = []
        for number in reversed(range(len(batches))):
            begin = self._clock.mark()
            self._ministage.backward(number, grads[number])
            backward_s.append(self._clock.seconds(begin, self._clock.mark()))
        return forward_s, backward_s


def estimate_in_step_s(row_s: float, most_rows: int, repeats: int) -> float:
    """About how long `time` takes for 1, 2, 4, ... rows, if a row takes so long alone."""
    times = [row_s * (1 << exponent) for exponent in range(most_rows.bit_length())]
    steps = (1 + repeats) * MICROBATCHES * NUM_COPIES
    return sum((steps * seconds for seconds in times if seconds < LONGEST_S), 0.0)


class _Copies(nn.Module):
    """Layers that are called one after the other: each takes what the one before gave, or where that is of
    another shape, what all take."""

    def __init__(
        self, layers: nn.ModuleDict, inputs: tuple[Any, ...], loss_fn: LossFn | None, clock: Clock
    ) -> None:
        super().__init__()
        self.layers = layers
        self._inputs, self._loss_fn, self._clock = inputs, loss_fn, clock
        self.seconds: float = 0.0
        """Of the last forward."""

    def forward(self, *tensors: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        begin = self._clock.mark()
        outputs: list[Tensor] = []
        for layer in self.layers.values():
            follows = len(tensors) == len(outputs) == 1 and outputs[0].shape == tensors[0].shape
            given = iter(outputs if follows else tensors)
            arguments = map_leaves(
                self._inputs,
                lambda leaf: next(given) if isinstance(leaf, ProbeTensor) else leaf,  # noqa: B023
            )
            made = tensors_in(layer(*arguments, **kwargs))
            if self._loss_fn is not None:
                targets = torch.zeros(made[0].shape[:-1], dtype=torch.int64, device=made[0].device)
                made = [self._loss_fn(made[0], targets)]
            outputs = made if follows or not outputs else [*outputs, *made]
        self.seconds = self._clock.seconds(begin, self._clock.mark())
        return tuple(outputs)
