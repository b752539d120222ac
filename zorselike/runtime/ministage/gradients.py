"""Reduced gradients of one ministage, as its optimizer wants them.

FSDP2 rounds a reduction's fp32 result to the dtype of the shards. Where these are bf16 or fp16 the
result is taken before that, from FSDP2's all-reduce hook (which runs on the output of a
reduce-scatter, or of ZeRO 0's all-reduce), and given to the fp32 master parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zorselike.cost.purposes import Purpose
from zorselike.runtime.memory.streams import Event, Stream
from zorselike.runtime.memory.turns import copy_in_turns
from zorselike.runtime.ministage.settings import RankResources
from zorselike.runtime.ministage.sharding import like_sharded, local_tensor

HALF = (torch.bfloat16, torch.float16)


class _Unrounded:
    """The gradients of one FSDP unit, summed over its reductions in the reduction's dtype."""

    def __init__(self, fsdp: FSDPModule, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._named = named
        self._arrived: list[Tensor] = []
        self._flat: Tensor | None = None
        fsdp.set_all_reduce_hook(self._arrived.append)

    def take(self) -> dict[str, Tensor]:
        """This rank's shards by name after a reduction: views of one flat tensor, to which further
        reductions are added. Drops what FSDP made of it."""
        for flat in self._arrived:
            self._flat = flat if self._flat is None else self._flat.add_(flat)
        self._arrived.clear()
        views = {}
        for name, parameter in self._named:
            if parameter.grad is not None and self._flat is not None:
                # FSDP lays the rounded gradients out as it does the flat tensor they come from.
                rounded = local_tensor(parameter.grad)
                views[name] = self._flat.as_strided(
                    rounded.size(), rounded.stride(), rounded.storage_offset()
                )
                parameter.grad = None
        return views

    def forget(self) -> None:
        self._arrived.clear()
        self._flat = None


class Gradients:
    """This rank's shards of a ministage's reduced gradients, on the device or on the host."""

    def __init__(
        self,
        units: Sequence[tuple[FSDPModule, Sequence[tuple[str, nn.Parameter]]]],
        resources: RankResources,
    ) -> None:
        """`units`: each FSDP unit with its trainable sharded parameters by global name."""
        self._memory, self._retired = resources.memory, resources.deferred_frees
        self._sharded = {name: parameter for _, named in units for name, parameter in named}
        self._unrounded = [
            _Unrounded(fsdp, named)
            for fsdp, named in units
            if named and any(parameter.dtype in HALF for _, parameter in named)
        ]
        self._local: dict[str, Tensor] = {}
        self._home: Stream = self._memory.streams.compute
        self.ready_on: Stream = self._home
        """The stream on which a reduction has left them."""
        self._on_host: dict[str, tuple[Tensor, Tensor]] = {}
        """Host buffer, and an empty tensor with its shape and dtype."""
        self._arrived: Event | None = None
        self._entered_bytes = 0

    def collect(self, stream: Stream) -> None:
        """After a reduction on `stream`: takes what it gave."""
        for unit in self._unrounded:
            self._local.update(unit.take())
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                self._local[name] = local_tensor(parameter.grad)
        self._home = self.ready_on = stream
        self._enter_ledger()

    def local(self, name: str) -> Tensor:
        """This rank's shard of one gradient."""
        return self._local[name]

    def has(self, name: str) -> bool:
        """Whether there is a gradient of that name, on the device."""
        return name in self._local

    def assign(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Gives the optimizer's parameters their gradients."""
        for name, parameter in parameters.items():
            if name in self._local and parameter.grad is None:
                parameter.grad = like_sharded(self._local[name], parameter)

    def drop(self, parameters: Mapping[str, nn.Parameter], last_use: Event) -> None:
        """Gives the gradients up after `last_use`: a second reduction would add to them."""
        self._retired.add(self._home, last_use, self._release(parameters))

    def forget(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Drops what an unfinished step left."""
        self.arrive(self._memory.streams.compute)
        self._release(parameters)
        for buffer, _ in self._on_host.values():
            self._memory.pool.give_back(Purpose.GRADIENT_SHARDS, buffer)
        self._on_host.clear()

    def _release(self, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
        held = list(self._local.values())
        self._memory.ledger.drop(Purpose.GRADIENT_SHARDS, "device", self._entered_bytes)
        self._entered_bytes = 0
        self._local = {}
        for parameter in (*self._sharded.values(), *parameters.values()):
            parameter.grad = None
        for unit in self._unrounded:
            unit.forget()
        return held

    # -- on the host -----------------------------------------------------------------------

    def offload(self) -> None:
        """Moves them to the host until a deferred update wants them."""
        streams, pool = self._memory.streams, self._memory.pool
        streams.store.wait(self.ready_on.record())
        pool.reserve(Purpose.GRADIENT_SHARDS, [local.nbytes for local in self._local.values()])
        copies = []
        for name, local in self._local.items():
            host = pool.take(Purpose.GRADIENT_SHARDS, local.nbytes)
            self._on_host[name] = (host, torch.empty(local.shape, dtype=local.dtype, device="meta"))
            copies.append((host, _bytes_of(local)))
        copy_in_turns(copies, streams.store, streams.beside(streams.store))
        self._stored = streams.store.record()
        self._retired.add(self._home, self._stored, self._release({}))

    def load(self) -> None:
        """Starts their way back."""
        streams = self._memory.streams
        streams.load_state.wait(self._stored)
        with streams.load_state.use():
            for name, (_, shape) in self._on_host.items():
                self._local[name] = torch.empty(shape.shape, dtype=shape.dtype, device=self._memory.device)
        copies = [(_bytes_of(self._local[name]), host) for name, (host, _) in self._on_host.items()]
        copy_in_turns(copies, streams.load_state, streams.beside(streams.load_state))
        for host, _ in self._on_host.values():
            self._memory.pool.give_back(Purpose.GRADIENT_SHARDS, host)
        self._on_host.clear()
        self._home, self._arrived = streams.load_state, streams.load_state.record()
        self._enter_ledger()

    def arrive(self, stream: Stream) -> None:
        """Makes `stream` wait for what `load` started."""
        if self._arrived is not None:
            stream.wait(self._arrived)
            # A host buffer that is written again is written after it was read.
            self._memory.streams.store.wait(self._arrived)
            self._arrived = None

    def _enter_ledger(self) -> None:
        num_bytes = sum(local.nbytes for local in self._local.values())
        self._memory.ledger.hold(Purpose.GRADIENT_SHARDS, "device", num_bytes - self._entered_bytes)
        self._entered_bytes = num_bytes


def _bytes_of(local: Tensor) -> Tensor:
    """A shard, which is contiguous, as `uint8 [num_bytes]`."""
    return local.view(-1).view(torch.uint8)
