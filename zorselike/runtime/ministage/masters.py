"""fp32 master weights beside shards in half precision.

FSDP2 has none: its mixed precision casts fp32 shards for each gather, so that these would have to be
loaded whole. Here a gather moves 2 bytes a parameter, and the fp32 weights move with the moments,
only for an update.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zorselike.cost.purposes import Purpose
from zorselike.runtime.memory.host_backed import HostBackedTensors
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.ministage.gradients import HALF
from zorselike.runtime.ministage.sharding import local_rows


def take_masters(
    named: Sequence[tuple[str, nn.Parameter]],
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None,
    borrowed: Collection[str],
) -> dict[str, Tensor]:
    """Turns whole parameters into the dtype that they compute in; what trains in half precision, and is
    not borrowed, leaves this rank's fp32 rows behind, by global name."""
    masters: dict[str, Tensor] = {}
    for name, parameter in named:
        dtype = param_dtype if param_dtype and parameter.is_floating_point() else parameter.dtype
        if dtype in HALF and parameter.requires_grad and name not in borrowed:
            masters[name] = local_rows(parameter, mesh).to(torch.float32, copy=True).contiguous()
        parameter.data = parameter.data.to(dtype)
    return masters


def place_masters(local: Mapping[str, Tensor], memory: Memory, *, offload: bool) -> list[HostBackedTensors]:
    """Enters a unit's master weights in the ledger, and offloads them if `offload`."""
    if not offload:
        num_bytes = sum(rows.numel() * rows.itemsize for rows in local.values())
        memory.ledger.hold(Purpose.OPTIMIZER_STATE, "device", num_bytes)
        return []
    compute = memory.streams.compute
    tensors = HostBackedTensors(
        local,
        purpose=Purpose.OPTIMIZER_STATE,
        memory=memory,
        homes=[compute],
        inbound=memory.streams.load_state,
    )
    tensors.free(tensors.store(compute.record()))
    return [tensors]
