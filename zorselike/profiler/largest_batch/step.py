"""One rank's part of a step of the whole model under a ZeRO stage, without its collectives.

The runtime's own classes compute it: parameters, gradients and optimizer state are sharded over all ranks
as in training, so that memory is what training takes. But a gather fills the whole from this rank's own
shard, and a reduction keeps this rank's own part: nobody waits for anybody, and a failure strands nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zorselike.plan.plan import Group, Microbatch, Ministage, Plan, Recompute
from zorselike.profiler.layers.probes import MeasuredModel, materialise
from zorselike.profiler.layers.row_search import TrialResult
from zorselike.profiler.machine.device_memory import DeviceMemory, list_owners, parameters_of
from zorselike.runtime.memory.memory import Ledger
from zorselike.runtime.ministage.ministage import ShardedMinistage
from zorselike.runtime.ministage.settings import MinistageSettings, RankResources
from zorselike.runtime.model.partition import partition
from zorselike.runtime.processes.processes import Processes


class ZeroStep:
    """The whole model on this rank as one ministage of all ranks."""

    def __init__(
        self, model: MeasuredModel, processes: Processes, *, zero: int, recompute: Recompute
    ) -> None:
        """Materialises what ZeRO keeps of the model on one rank, one unit after the other."""
        # With ZeRO 0 a rank holds what it would hold alone.
        own = processes.alone if zero == 0 else processes.everyone
        modules = tuple(module for module, _ in model.workload.layers)
        ranks = tuple(range(dist.get_world_size(own)))
        microbatches = tuple(Microbatch(rank, rank, rank + 1) for rank in ranks)
        group = Group(ranks=ranks, microbatches=microbatches, zero=zero, recompute=recompute)
        plan = Plan(len(ranks), (group,), (Ministage(0, modules),)).validate()
        self._model, self._zero, self._device = model, zero, processes.device
        self._has_state = False
        part = partition(model.build().to(dtype=model.dtype), plan)[0]
        resources = RankResources.of(self._device)
        settings = MinistageSettings(
            group=group,
            mesh=DeviceMesh.from_group(own, self._device.type, mesh_dim_names=("dp",)),
            materialise=lambda module, _: materialise(module, self._device),
            modules=modules,
        )
        self._memory = resources.memory
        self._ministage = ShardedMinistage(0, part.module, part.units, settings, resources)
        self._owners = list_owners(part.module)
        for module in part.module.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(OwnGather())  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(OwnReduction())  # type: ignore[arg-type]
        self._ministage.warm_up()
        named = list(self._ministage.trained.items())
        self._optimizer = torch.optim.AdamW(named, lr=1e-5, fused=True)
        self._ministage.train_by(self._optimizer)

    def run(self, rows: int, memory: DeviceMemory) -> TrialResult:
        """The memory of a step that has optimizer state, with a microbatch of one row and then one of `rows`
        rows, which finds gradients there. Raises what the device raises when memory does not suffice; this
        object is then of no more use."""
        length = self._model.workload.sequence_length
        batches = [torch.zeros(size, length, dtype=torch.int64, device=self._device) for size in (1, rows)]
        kept = 0
        for _ in range(1 if self._has_state else 2):  # The first step makes it.
            with memory.watching(self._ministage.module, self._held):
                kept = self._step(batches, memory)
            self._has_state = True
        return TrialResult(
            fits=True, peak_bytes=memory.peak_bytes, limit_bytes=memory.limit_bytes, kept_bytes=kept
        )

    def _step(self, batches: Sequence[Tensor], memory: DeviceMemory) -> int:
        """Bytes that the last forward kept."""
        ministage = self._ministage
        gathers = self._zero in (1, 2)  # With a single ministage once a step.
        kept = 0
        self._memory.streams.begin()
        if gathers:
            ministage.unshard()
        for number, tokens in enumerate(batches):
            outputs = ministage.forward(number, (tokens,), [False], {}, train=True)
            loss = self._model.loss_fn(outputs, tokens) / tokens.numel()
            ministage.keep_outputs(number, (loss,))
            grad = torch.ones_like(loss)
            del outputs, loss
            kept = memory.kept_bytes()
            ministage.backward(number, [grad])
            memory.note()
        if self._zero < 3:
            ministage.reduce()
        if gathers:
            ministage.reshard()
        with ministage.updating():
            self._optimizer.step()
        ministage.await_update()
        return kept

    @property
    def ledger(self) -> Ledger:
        """What this rank has held, by purpose."""
        return self._memory.ledger

    def _held(self) -> int:
        """Bytes that this rank's ledger knows of, and gradients that are whole; asked on a CPU."""
        grads = [p.grad for p in parameters_of(self._owners) if p.grad is not None]
        whole = [grad for grad in grads if not isinstance(grad, DTensor)]
        return self.ledger.device_bytes + sum(grad.nbytes for grad in whole)


class _OwnMemory:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class OwnGather(_OwnMemory):
    """In FSDP2's place for an all-gather: every rank's part is a copy of one's own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        # The input may be a view of the output, as FSDP2 lays them out.
        own = input_tensor.flatten().clone()
        output_tensor.view(-1, own.numel()).copy_(own)


class OwnReduction(_OwnMemory):
    """In FSDP2's place for a reduce-scatter: the first part of one's own gradients."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.flatten()[: output_tensor.numel()].view_as(output_tensor))
