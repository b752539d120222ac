"""A tiny model to measure, and the processes to measure it with."""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
from torch import nn

from zorselike.models import build_model, get_config
from zorselike.models.workload import make_workload
from zorselike.plan.workload import Workload
from zorselike.profiler.layers.probes import MeasuredModel
from zorselike.runtime.loss import LossFn, token_cross_entropy
from zorselike.runtime.processes.processes import Processes, join_processes

TOKENS = 16
SMALL = {"num_layers": 2, "vocab_size": 64, "max_seq_len": 32}


def build(family: str = "llama") -> nn.Module:
    with torch.device("meta"):
        return build_model(family, "debug", **SMALL)


def workload(family: str = "llama", dtype: str = "float32") -> Workload:
    return make_workload(
        get_config(family, "debug", **SMALL), sequence_length=TOKENS, dtype=dtype, model=f"{family} debug"
    )


def measured_model(
    family: str = "llama",
    dtype: str = "float32",
    most_rows: int = 64,
    repeats: int = 1,
    num_tokens: int = SMALL["vocab_size"],
    loss_fn: LossFn = token_cross_entropy,
) -> MeasuredModel:
    return MeasuredModel(
        build=lambda: build(family),
        workload=workload(family, dtype),
        loss_fn=loss_fn,
        num_tokens=num_tokens,
        most_rows=most_rows,
        repeats=repeats,
    )


def join(port: int, node: str = "") -> AbstractContextManager[Processes]:
    """What torchrun's variables say, on a node of its own if it has a name."""
    gc.freeze()  # What the parent loaded need not be searched after every trial.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if node:
        os.environ.update(ZORSELIKE_NODE=node, LOCAL_RANK="0")
    return join_processes(torch.device("cpu"), timeout=timedelta(seconds=30))
