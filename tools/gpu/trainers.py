"""The contestants on one Llama: our pipeline, and FSDP2 as a user writes it."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from zorselike import HeteroPipeline
from zorselike.models.flops import parameters_by_module
from zorselike.models.llama import Llama, LlamaConfig
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan, Recompute
from zorselike.plan.shares import cut_in_proportion

from .job import OFFLOAD_OF, Job, Shape

_STD = 0.02
_TILE_NUMBERS = 2**20 + 7
_adamw = partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.1)


def device_of(job: Job) -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if job.device == "cuda" else torch.device("cpu")


def config_of(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        dim=shape.dim,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_heads,
        ffn_hidden=shape.ffn_hidden,
        vocab_size=shape.vocab_size,
        max_seq_len=shape.sequence,
    )


class TiledLlama(Llama):
    """A Llama whose weights repeat a million random numbers.

    Drawing billions of normal numbers takes minutes. Constant weights would not do: a GPU multiplies them
    faster than real ones, since fewer of its bits change.
    """

    def _init_weights(self, module: nn.Module) -> None:
        fill(module)


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Writes the tile to every matrix below `module`, and ones to every vector (the norms)."""
    for parameter in module.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.dim() < 2:
            local.fill_(1.0)
            continue
        tile = _tile(local.device, local.dtype)
        flat = local.view(-1)
        whole = flat.numel() // tile.numel() * tile.numel()
        flat[:whole].view(-1, tile.numel()).copy_(tile)
        flat[whole:].copy_(tile[: flat.numel() - whole])


@cache
def _tile(device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(_TILE_NUMBERS, generator=generator) * _STD).to(device, dtype)


def build_model(job: Job) -> Llama:
    """The model on the meta device."""
    with torch.device("meta"):
        return TiledLlama(config_of(job.shape))


def make_plan(job: Job) -> Plan:
    """One rank with everything, in ministages of about equally many parameters."""
    rows, size = job.num_rows, job.shape.microbatch_rows
    microbatches = tuple(Microbatch(0, start, min(start + size, rows)) for start in range(0, rows, size))
    group = Group((0,), microbatches, zero=2, offload=OFFLOAD_OF[job.variant], recompute=_recompute_of(job))
    sizes = parameters_by_module(config_of(job.shape))
    names = list(sizes)
    ends = cut_in_proportion(list(sizes.values()), [1.0] * job.num_ministages)
    starts = (0, *ends[:-1])
    ministages = tuple(Ministage(0, tuple(names[a:b])) for a, b in zip(starts, ends, strict=True))
    return Plan(rows, (group,), ministages)


def _recompute_of(job: Job) -> Recompute:
    return "layer" if job.recomputes else "none"


def make_batch(job: Job) -> tuple[Tensor, Tensor]:
    """Tokens and targets `[rows, sequence]` in host memory, the same for every variant."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, job.num_rows, job.shape.sequence)
    inputs, targets = torch.randint(job.shape.vocab_size, shape, generator=generator)
    return (inputs.pin_memory(), targets.pin_memory()) if job.device == "cuda" else (inputs, targets)


class Trainer(Protocol):
    """Takes one optimizer step after the other over the same rows."""

    def step(self) -> None:
        """Starts one step; on a GPU it need not be over on return."""

    def loss(self) -> float:
        """Mean loss of the last step; waits for it."""


def make_trainer(job: Job) -> Trainer:
    return OurTrainer(job) if job.variant in OFFLOAD_OF else FsdpTrainer(job)


class OurTrainer:
    """`HeteroPipeline` on a plan of one rank."""

    def __init__(self, job: Job) -> None:
        self.pipe = HeteroPipeline(
            build_model(job),
            make_plan(job),
            optimizer=partial(_adamw, fused=job.is_fused),
            param_dtype=torch.bfloat16,
            compile=job.compiles,
            device=device_of(job),
            max_norm=None if job.updates == "at once" else 1.0,
            clip="ministage" if job.updates == "at once, clipped" else "global",
            silence_s=None,
        )
        self._batch = make_batch(job)
        self._result: Any = None

    def step(self) -> None:
        self._result = self.pipe.step(*self._batch)

    def loss(self) -> float:
        return float(self._result.loss)


class FsdpTrainer:
    """FSDP2 by hand: a unit a layer, each recomputed, gradients accumulated over the microbatches.

    Without offloading, weights stay gathered over all microbatches of a step, which is the fastest that FSDP2
    does. With `CPUOffloadPolicy` they come and go with every layer, since a device that holds all of them
    needs no offloading. `holds_most` of the job turns to what needs least memory.
    """

    def __init__(self, job: Job) -> None:
        self._device = device_of(job)
        is_offloading = job.variant == "d"
        self._keeps_gathered = not is_offloading and not job.holds_most
        self._syncs_every = job.holds_most
        self._rows = job.shape.microbatch_rows
        self._model = build_model(job)
        self._shard(is_offloading)
        self._model.to_empty(device="cpu" if is_offloading else self._device)
        fill(self._model)
        self._optimizer = _adamw(self._model.parameters(), fused=job.is_fused)
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
            logits = model(inputs[rows]).flatten(0, 1).float()
            loss = cross_entropy(logits, targets[rows].flatten(), reduction="sum") / targets.numel()
            torch.autograd.backward(loss)
            self._loss_sum += loss.detach()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def loss(self) -> float:
        return float(self._loss_sum)
