"""The model that is trained: a Llama of the first family, its weights cheap to draw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from zorselike.models.flops import flops_per_token, num_parameters, parameters_by_module
from zorselike.models.llama import Llama, LlamaConfig
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

from .job import OFFLOAD_OF, Job, Shape

_STD = 0.02
_TILE_NUMBERS = 2**20 + 7


def config_of(shape: Shape) -> LlamaConfig:
    """The shape as our models know it."""
    return LlamaConfig(
        dim=shape.dim,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_heads,
        ffn_hidden=shape.ffn_hidden,
        vocab_size=shape.vocab_size,
        max_seq_len=shape.sequence,
    )


class TiledLlama(Llama):
    """A Llama whose weights repeat a million random numbers.

    Drawing billions of normal numbers takes minutes. Constant weights would not do: a GPU
    multiplies them faster than real ones, since fewer of its bits change.
    """

    def _init_weights(self, module: nn.Module) -> None:
        fill(module)


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Writes the tile to every matrix below `module`, and ones to every vector (the norms)."""
    for parameter in module.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.dim() < 2:
            local.fill_(1.0)
            continue
        tile = _tile(local.device, local.dtype)
        flat = local.view(-1)
        whole = flat.numel() // tile.numel() * tile.numel()
        flat[:whole].view(-1, tile.numel()).copy_(tile)
        flat[whole:].copy_(tile[: flat.numel() - whole])


@cache
def _tile(device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(_TILE_NUMBERS, generator=generator) * _STD).to(device, dtype)


def build_model(job: Job) -> Llama:
    """The model on the meta device."""
    make = TiledLlama if job.init == "tile" else Llama
    with torch.device("meta"):
        return make(config_of(job.shape))


def make_plan(job: Job) -> Plan:
    """One rank with everything, in ministages of about equally many parameters."""
    rows, size = job.num_rows, job.shape.microbatch_rows
    microbatches = tuple(Microbatch(0, start, min(start + size, rows)) for start in range(0, rows, size))
    group = Group((0,), microbatches, zero=2, offload=OFFLOAD_OF[job.variant], recompute="layer")
    sizes = parameters_by_module(config_of(job.shape))
    cuts = split_evenly(list(sizes.values()), job.num_ministages)
    names = list(sizes)
    ministages = tuple(Ministage(0, tuple(names[start:stop])) for start, stop in cuts)
    return Plan(rows, (group,), ministages)


def split_evenly(weights: Sequence[float], num_parts: int) -> list[tuple[int, int]]:
    """Cuts a list into consecutive parts, none empty, of which the heaviest is lightest."""
    if not 1 <= num_parts <= len(weights):
        raise ValueError(f"{len(weights)} modules do not make {num_parts} ministages")

    @cache
    def best(start: int, parts: int) -> tuple[float, tuple[int, ...]]:
        if parts == 1:
            return sum(weights[start:]), (len(weights),)
        candidates = []
        for stop in range(start + 1, len(weights) - parts + 2):
            rest, stops = best(stop, parts - 1)
            candidates.append((max(sum(weights[start:stop]), rest), (stop, *stops)))
        return min(candidates)

    stops = best(0, num_parts)[1]
    return list(zip((0, *stops[:-1]), stops, strict=True))


def count_parameters(shape: Shape) -> int:
    return num_parameters(config_of(shape))


def count_flops(shape: Shape) -> int:
    """Floating-point operations per token of a step that computes its layers' forwards twice."""
    return flops_per_token(config_of(shape), shape.sequence, recompute=True)


def make_batch(job: Job) -> tuple[Tensor, Tensor]:
    """Tokens and targets `[rows, sequence]` in host memory, the same for every variant."""
    generator = torch.Generator().manual_seed(1)
    shape = (job.num_rows, job.shape.sequence)
    inputs = torch.randint(job.shape.vocab_size, shape, generator=generator)
    targets = torch.randint(job.shape.vocab_size, shape, generator=generator)
    return (inputs.pin_memory(), targets.pin_memory()) if job.device == "cuda" else (inputs, targets)
