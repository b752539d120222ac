"""Which device this process computes on."""

from __future__ import annotations

import os

import torch

from zorselike.errors import ConfigError


def find_own_device(wanted: str, *, without_gpu: str) -> torch.device:
    """The device of this process (`auto`, `cpu` or `cuda`), made the current one.

    Raises `ConfigError` where it is not there; `without_gpu`: what is said if `cuda` is wanted where torch
    finds no GPU.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(without_gpu)
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"this is process {local_rank} of its node, which has {torch.cuda.device_count()} GPUs: start as "
            "many processes as the node has GPUs (torchrun --nproc-per-node)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
