"""Cards that two CPU ranks pretend to be: modules of a small model sleep as long as those of a large one
would compute on them, by data sheets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zorselike.cli.assumed_profile import assume_profile
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.hf import Lora, build_on_meta
from zorselike.profiler.workload.module_workload import measure_causal_lm

RANK = 16
"""Of the adapters."""
DTYPE = "bfloat16"

Seconds = tuple[float, float]
"""Forward and backward of one row."""


@dataclass(frozen=True)
class Pair:
    """Two cards in one machine, and what is trained on them."""

    name: str
    types: tuple[str, str]
    """As the catalogue has them; the faster one is first."""
    memory_gib: tuple[float, float]
    hidden: int
    num_layers: int
    rows: int = 16
    sequence: int = 1024

    @property
    def cluster(self) -> str:
        """The cluster file."""
        devices = ", ".join(f'"{one}"' for one in self.types)
        return (
            f'version = 1\nname = "desk"\n[[nodes]]\nname = "desk"\ndevices = [{devices}]\n'
            'host_memory = "64GiB"\nhost_link = { bandwidth = "12GB/s" }\n'
            'fabric = { bandwidth = "6GB/s", latency = "15us" }\n'
        )


def list_seconds(pair: Pair, folder: Path) -> list[dict[str, Seconds]]:
    """What each module of the model whose config is in a folder takes on each card."""
    model = build_on_meta(folder, lora=Lora(RANK), frozen_dtype=torch.bfloat16)
    workload = measure_causal_lm(model, sequence_length=pair.sequence, dtype=DTYPE, name=pair.name)
    times = LayerTimeModel(assume_profile(workload), workload)
    return [
        {
            name: (times.forward_s(kind, card, 1, "none"), times.backward_s(kind, card, 1, "none"))
            for name, kind in workload.layers
        }
        for card in pair.types
    ]


class Card:
    """What a rank, or a part of a model, computes on."""

    def __init__(self) -> None:
        self.is_awake = True
        """Whether nothing sleeps: for the first step, which sets everything up."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Card:
        return self  # A copied module runs on the same card.

    def attach(self, model: nn.Module, seconds: Mapping[str, Seconds], names: Sequence[str]) -> None:
        """Modules of these names sleep after they have computed, and before their gradients go on."""
        for name in names:
            model.get_submodule(name).register_forward_hook(_Sleeper(self, seconds[name]))

    def spend(self, seconds: float) -> None:
        if not self.is_awake:
            time.sleep(seconds)


@dataclass(frozen=True)
class _Sleeper:
    card: Card
    seconds: Seconds

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if (
            output.dim() < 2
        ):  # Ours calls layers with one number too, to reduce gradients; nothing computes then.
            return output
        slept: Tensor = _Sleep.apply(output, self.card, self.seconds)  # type: ignore[no-untyped-call]
        return slept


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, card: Card, seconds: Seconds) -> Tensor:
        ctx.card, ctx.seconds = card, x.shape[0] * seconds[1]
        card.spend(x.shape[0] * seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.card.spend(ctx.seconds)
        return grads[0], None, None
