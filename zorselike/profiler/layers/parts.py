"""A rank's part of a layer under tensor parallelism, on one device alone: its pieces of the weights and its
positions, cut as the runtime cuts them. What collectives would bring is copied from its own."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zorselike.plan.parts import Replica
from zorselike.profiler.layers.probes import LayerProbe, MeasuredModel
from zorselike.runtime.model.decoder_probe import hidden_states, with_hidden_states
from zorselike.runtime.tensor_parallel.pieces import HeldPiece, TensorParallel, cut_layer
from zorselike.runtime.tensor_parallel.sequence import OwnPositions
from zorselike.runtime.tensor_parallel.styles import find_blocks, find_cuts


class LonePositions(OwnPositions):
    """The positions of the last rank of a replica, which has most, without the others."""

    def __init__(self, degree: int, length: int) -> None:
        ranks = tuple(range(degree))
        super().__init__(Replica(ranks), degree - 1, length, cast(ProcessGroup, None), ranks)

    def all_gather(self, own: Tensor) -> Tensor:
        """As many positions as all ranks have, copies of this one's."""
        copies = -(-self.length // self.size)
        return torch.cat([own] * copies, dim=1)[:, : self.length].contiguous()

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """This rank's positions of its own sum."""
        return self.slice(whole).contiguous()


class LayerPart:
    """What a rank of a replica of some degree computes of a layer."""

    def __init__(self, model: MeasuredModel, probe: LayerProbe, layer: nn.Module, degree: int) -> None:
        """Cuts the layer, which has values; `degree` is one that its heads allow."""
        whole = model.build()
        blocks = find_blocks(whole)
        last = HeldPiece(degree - 1, cast(DeviceMesh, None), counts=True)
        self._positions = LonePositions(degree, model.workload.sequence_length)
        cuts = find_cuts(whole, blocks[probe.module], degree)
        cut_layer(layer, probe.module, TensorParallel(blocks, cuts, (last,), self._positions))

    def slice(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A layer's arguments with the hidden states of this rank's positions."""
        hidden = hidden_states(inputs, kwargs)
        own = self._positions.slice(hidden.detach()).contiguous().requires_grad_(hidden.requires_grad)
        return with_hidden_states(inputs, kwargs, own)
