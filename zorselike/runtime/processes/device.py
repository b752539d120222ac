"""Which device this process computes on, and in which precision the job does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from zorselike.errors import ConfigError
from zorselike.runtime.processes.identity import RANK_ALONE, find_identity
from zorselike.runtime.processes.world import ProcessInfo

ParamDtype = torch.dtype | Literal["auto"] | None

_FIRST_WITH_BF16 = 80
"""Compute capability (Ampere) from which on matrix units multiply bf16."""


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
    index = identity.own_gpu(num_gpus)
    if index >= num_gpus:
        raise ConfigError(
            f"this is process {index} of its node, which has {num_gpus} GPUs: start as many processes as the "
            "node has GPUs (torchrun --nproc-per-node)"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def use_device(wanted: torch.device | str | None) -> torch.device:
    """The device that a caller names, made the current one; `find_device`'s if it names none or not which.

    Raises `ConfigError` for one on which no rank computes.
    """
    found = None if wanted is None else _as_device(wanted)
    if found is not None and (found.type != "cuda" or not torch.cuda.is_available()):
        return found  # That there is none is an error of all ranks alike.
    if found is not None and found.index is not None:
        torch.cuda.set_device(found)
        return found
    return find_device("auto", without_gpu="", rank=dist.get_rank() if dist.is_initialized() else None)


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Inside, a GPU is this thread's current one. A thread begins with the first, whatever others have, and
    FSDP2 waits for the current stream of the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _as_device(wanted: torch.device | str) -> torch.device:
    mistake = ConfigError(f"device = '{wanted}': ranks compute on 'cpu' or 'cuda'; give one of them")
    try:
        found = torch.device(wanted)
    except (RuntimeError, TypeError):
        raise mistake from None
    if found.type not in ("cpu", "cuda"):
        raise mistake
    return found


def choose_dtype(wanted: ParamDtype, processes: Sequence[ProcessInfo]) -> torch.dtype | None:
    """The dtype of all ranks: what is wanted, "auto" replaced by what every card can do."""
    if wanted != "auto":
        assert not isinstance(wanted, str)
        return wanted
    return torch.float16 if any(map(lacks_bf16, processes)) else torch.bfloat16


def computes_in_fp16(model: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether gradients may overflow, also on their way through what is frozen, so that losses are scaled."""
    return torch.float16 in {dtype or p.dtype for p in model.parameters()}


def lacks_bf16(process: ProcessInfo) -> bool:
    """Whether its GPU is older than those that compute in bf16 in hardware."""
    capability = re.fullmatch(r"sm_(\d+)", process.architecture)
    return capability is not None and int(capability[1]) < _FIRST_WITH_BF16
