"""Which device this process computes on."""

from __future__ import annotations

import torch

from zorselike.errors import ConfigError
from zorselike.runtime.processes.identity import RANK_ALONE, find_identity


def find_device(wanted: str, *, without_gpu: str, rank: int | None = None) -> torch.device:
    """The device of this process (`auto`, `cpu` or `cuda`), made the current one: on a node with several
    GPUs that of its local rank. Where Slurm or an MPI launcher shows each process one GPU, that one.

    `rank`: see `find_identity`. Raises `ConfigError` where the device is not there; `without_gpu`: what is
    said if `cuda` is wanted where torch finds no GPU.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(without_gpu)
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    identity, num_gpus = find_identity(rank=rank), torch.cuda.device_count()
    if identity.source == RANK_ALONE and identity.size > 1 and num_gpus > 1:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, but not LOCAL_RANK, and this node has {num_gpus} GPUs: set "
            "LOCAL_RANK too (the process's number on its node, from 0), or show each process one GPU"
        )
    index = 0 if num_gpus == 1 and identity.source not in ("", "torchrun") else identity.local_rank
    if index >= num_gpus:
        raise ConfigError(
            f"this is process {index} of its node, which has {num_gpus} GPUs: start as many processes as the "
            "node has GPUs (torchrun --nproc-per-node)"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
