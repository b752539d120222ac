"""How FSDP2 lays a parameter out over the ranks of a mesh."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds; a plain tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def like_sharded(local: Tensor, sharded: Tensor) -> Tensor:
    """`local` as this rank's part of a tensor that is distributed as `sharded` is."""
    tensor = sharded.detach()
    if not isinstance(tensor, DTensor):
        return local
    wrapped: Tensor = DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return wrapped


def local_rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a whole parameter: FSDP2 shards dimension 0 as `torch.chunk` does, over the
    mesh's last dimension."""
    dimension = mesh.ndim - 1
    chunks = whole.detach().chunk(mesh.size(dimension))
    index = mesh.get_local_rank(dimension)
    return chunks[index] if index < len(chunks) else whole.detach()[:0]
