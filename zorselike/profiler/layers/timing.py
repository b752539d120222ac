"""Seconds and bytes of one layer's forward and backward against rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zorselike.cost.profile import LayerTimes, Source
from zorselike.plan.plan import Recompute
from zorselike.profiler.clock import Clock
from zorselike.profiler.layers.parts import LayerPart
from zorselike.profiler.layers.probes import LayerProbe, MeasuredModel, build_layer, make_inputs
from zorselike.profiler.layers.row_search import MaxRows, TrialResult, find_max_rows
from zorselike.profiler.machine.device_memory import DeviceMemory
from zorselike.runtime.model.nested import tensors_in

WARMUPS = 2
"""Steps before any that counts: kernels are chosen, caches filled, clocks raised."""


class LayerBench:
    """One layer on the device, ready to be run with any number of rows."""

    def __init__(
        self,
        model: MeasuredModel,
        probe: LayerProbe,
        *,
        device: torch.device,
        memory: DeviceMemory,
        recompute: Recompute = "none",
        degree: int = 1,
    ) -> None:
        """`degree`: of tensor parallelism; what is measured then is one rank's part, without collectives."""
        self._model, self._probe, self._recompute = model, probe, recompute
        self._device, self._memory = device, memory
        self._clock = Clock(device)
        self._layer = build_layer(model.build, probe.module, dtype=model.dtype, device=device)
        self._degree = degree
        self._part = LayerPart(model, probe, self._layer, degree) if degree > 1 else None

    def measure(
        self,
        *,
        device: str,
        source: Source,
        time_in_step: Callable[[int, TrialResult], tuple[float, float] | None] = lambda rows, result: None,
        told: Callable[[int, TrialResult], None] = lambda rows, result: None,
    ) -> LayerTimes | None:
        """The layer's times against 1, 2, 4, ... rows up to the model's `most_rows`, or to the most that fit;
        None if not even one row fits. `device`: its name in the profile. `time_in_step` may have better times
        than a layer alone; `told` hears of each trial."""

        def trial(rows: int) -> TrialResult:
            result = self.try_rows(rows, repeats=self._model.repeats)
            told(rows, result)
            return result

        found = find_max_rows(trial, most_rows=self._model.most_rows)
        if not found.measured:
            return None
        times = [time_in_step(rows, own) or (own.forward_s, own.backward_s) for rows, own in found.measured]
        return LayerTimes(
            kind=self._probe.kind,
            device=device,
            dtype=self._model.workload.dtype,
            sequence_length=self._model.workload.sequence_length,
            recompute=self._recompute,
            tensor_parallel=self._degree,
            rows=tuple(rows for rows, _ in found.measured),
            forward_s=tuple(forward_s for forward_s, _ in times),
            backward_s=tuple(backward_s for _, backward_s in times),
            max_rows=None if found.refused_rows is None else found.max_rows,
            memory_bytes_per_row=kept_per_row(found),
            source=source,
        )

    def try_rows(self, rows: int, *, repeats: int) -> TrialResult:
        """Median times of `repeats` steps with so many rows, or that they do not fit; then everything but
        the layer is given back."""
        try:
            result = self._run(rows, repeats)
        except Exception as error:
            if not self._memory.is_refusal(error):
                raise
            # What the traceback holds is freed when this block ends, and given back below.
            result = TrialResult(fits=False, limit_bytes=self._memory.limit_bytes)
        self._layer.zero_grad(set_to_none=True)
        self._memory.release()
        return result

    def _run(self, rows: int, repeats: int) -> TrialResult:
        inputs, kwargs = make_inputs(
            self._probe, rows, num_tokens=self._model.num_tokens, device=self._device
        )
        if self._part is not None:
            inputs, kwargs = self._part.slice(inputs, kwargs)
        grads = self._make_grads(inputs, kwargs)
        marks = []
        kept, peak, has_backward = 0, 0, False
        for number in range(WARMUPS + repeats):
            # Memory is counted where time is not: on a CPU counting itself takes time.
            counts = number < WARMUPS
            with self._memory.watching(self._layer, self._held) if counts else nullcontext():
                begin = self._clock.mark()
                outputs = self._forward(inputs, kwargs, grads)
                between = self._clock.mark()
                if counts:
                    kept = self._memory.kept_bytes()
                due = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
                if due and self._probe.is_last:
                    torch.autograd.backward([loss for loss, _ in due])
                elif due:
                    torch.autograd.backward([out for out, _ in due], [grad for _, grad in due])
                marks.append((begin, between, self._clock.mark()))
            if counts:
                peak = self._memory.peak_bytes
            has_backward = bool(due)
            del outputs, due
            for tensor in tensors_in([inputs, kwargs]):
                tensor.grad = None
        timed = marks[WARMUPS:]
        return TrialResult(
            fits=True,
            peak_bytes=peak,
            limit_bytes=self._memory.limit_bytes,
            forward_s=median(self._clock.seconds(begin, between) for begin, between, _ in timed),
            # Frozen, with nothing before it that trains, a layer has none.
            backward_s=has_backward * median(self._clock.seconds(between, end) for _, between, end in timed),
            kept_bytes=kept,
        )

    def _make_grads(self, inputs: Any, kwargs: Any) -> list[Tensor]:
        """Gradients of what the layer returns, or for the last layer the targets of its loss."""
        with torch.no_grad():
            outputs = tensors_in(self._layer(*inputs, **kwargs))
        if self._probe.is_last:
            targets = outputs[0]
            return [torch.randint(targets.shape[-1], targets.shape[:-1], device=self._device)]
        return [torch.randn_like(output) for output in outputs]

    def _forward(self, inputs: Any, kwargs: Any, grads: list[Tensor]) -> list[Tensor]:
        recomputes = self._recompute == "layer" and self._probe.is_numbered
        run = partial(checkpoint, self._layer, use_reentrant=False) if recomputes else self._layer
        outputs = run(*inputs, **kwargs)
        if self._probe.is_last:
            return [self._model.loss_fn(outputs, grads[0])]
        return tensors_in(outputs)

    def _held(self) -> int:
        """Bytes of the layer's parameters and of the gradients that they have."""
        return sum(t.nbytes for p in self._layer.parameters() for t in (p, p.grad) if t is not None)


def kept_per_row(found: MaxRows) -> float | None:
    """Bytes of one row that a forward leaves for the backward: the growth between the fewest and the most
    rows measured; None if memory was not counted."""
    (few, less), (many, more) = found.measured[0], found.measured[-1]
    if not more.kept_bytes:
        return None
    if few == many:
        return more.kept_bytes / many
    return (more.kept_bytes - less.kept_bytes) / (many - few)
