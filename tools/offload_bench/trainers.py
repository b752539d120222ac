"""The contestants, each a model that takes steps: our pipeline, and FSDP2 as a user writes it."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from zorselike import HeteroPipeline

from .job import CPU_OFFLOADING, OFFLOAD_OF, Job
from .llama import build_model, fill, make_batch, make_plan
from .machine import device_of

_adamw = partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.1, fused=True)


class Trainer(Protocol):
    """Takes one optimizer step after the other over the same rows."""

    def step(self) -> None:
        """Starts one step; on a GPU it need not be over on return."""

    def loss(self) -> float:
        """Mean loss of the last step; waits for it."""

    def counted_bytes(self) -> tuple[int | None, int | None]:
        """Peaks on device (a CPU has only planned ones) and host by the contestant's own books; None:
        it has none."""

    def memory(self) -> str:
        """Where its bytes are, as a table; empty if it does not say."""


def make_trainer(job: Job) -> Trainer:
    """The contestant of a job, set up."""
    return OurTrainer(job) if job.variant in OFFLOAD_OF else FsdpTrainer(job)


class OurTrainer:
    """`HeteroPipeline` on a plan of one rank."""

    def __init__(self, job: Job) -> None:
        self.pipe = HeteroPipeline(
            build_model(job),
            make_plan(job),
            optimizer=_adamw,
            param_dtype=torch.bfloat16,
            compile=job.compiles,
            device=device_of(job),
            silence_s=None,
        )
        self._inputs, self._targets = make_batch(job)
        self._result: Any = None

    def step(self) -> None:
        self._result = self.pipe.step(self._inputs, self._targets)

    def loss(self) -> float:
        return float(self._result.loss)

    def counted_bytes(self) -> tuple[int | None, int | None]:
        report = self.pipe.memory_report()
        device_bytes = report.device_peak_bytes
        return report.device_planned_bytes if device_bytes is None else device_bytes, report.host_peak_bytes

    def memory(self) -> str:
        return str(self.pipe.memory_report())


class FsdpTrainer:
    """FSDP2 by hand: a unit a layer, each recomputed, gradients accumulated over the microbatches.

    Without offloading, weights stay gathered over all microbatches of a step, which is the fastest
    that FSDP2 does. With `CPUOffloadPolicy` they come and go with every layer, since a device that
    holds all of them needs no offloading; `d_kept` keeps them nevertheless. `holds_most` of the job
    turns to what needs the least memory.
    """

    def __init__(self, job: Job) -> None:
        self._device = device_of(job)
        is_offloading = job.variant in CPU_OFFLOADING
        self._keeps_gathered = job.variant != "d" and not job.holds_most
        self._syncs_every = job.holds_most
        self._rows = job.shape.microbatch_rows
        self._model = build_model(job)
        self._shard(is_offloading)
        self._model.to_empty(device="cpu" if is_offloading else self._device)
        fill(self._model)
        self._optimizer = _adamw(self._model.parameters())
        self._inputs, self._targets = make_batch(job)
        self._loss_sum = torch.zeros((), device=self._device)

    def _shard(self, is_offloading: bool) -> None:
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self._device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "reshard_after_forward": not self._keeps_gathered,
        }
        if is_offloading:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        model = self._model
        for layer in model.layers.values():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
            fully_shard(layer, **options)
        assert model.tok_embeddings is not None and model.norm is not None and model.output is not None
        fully_shard(model.tok_embeddings, **options)
        fully_shard([model.norm, model.output], **options)
        fully_shard(model, **options)

    def step(self) -> None:
        model = self._model
        assert isinstance(model, FSDPModule)
        inputs, targets = (t.to(self._device, non_blocking=True) for t in (self._inputs, self._targets))
        starts = range(0, len(inputs), self._rows)
        self._loss_sum = torch.zeros((), device=self._device)
        for start in starts:
            is_last = start == starts[-1]
            model.set_requires_gradient_sync(is_last or self._syncs_every)
            model.set_reshard_after_backward(is_last or not self._keeps_gathered)
            model.set_is_last_backward(is_last)
            rows = slice(start, start + self._rows)
            loss = _summed_loss(model(inputs[rows]), targets[rows]) / targets.numel()
            torch.autograd.backward(loss)
            self._loss_sum += loss.detach()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def loss(self) -> float:
        return float(self._loss_sum)

    def counted_bytes(self) -> tuple[int | None, int | None]:
        return None, None

    def memory(self) -> str:
        return ""


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
