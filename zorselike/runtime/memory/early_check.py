"""Whether the hosts of a job have room for a plan, found before anything is allocated."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from zorselike.cost.memory import MinistageBytes, walk_memory
from zorselike.cost.parameter_bytes import ParameterBytes, count_shards
from zorselike.errors import ConfigError
from zorselike.plan.plan import Plan
from zorselike.runtime.comm.ranks import Ranks
from zorselike.runtime.model.part import ModelPart
from zorselike.runtime.processes.world import ProcessInfo
from zorselike.schedule.actions import Action

GIB = 2**30


def refuse_unfitting_plan(
    plan: Plan,
    parts: tuple[ModelPart, ...],
    actions: dict[int, list[Action]],
    ranks: Ranks,
    processes: tuple[ProcessInfo, ...],
    *,
    param_dtype: torch.dtype | None,
) -> None:
    """Raises `ConfigError` on every rank alike if the ranks of a node would put more into host memory
    than it has: what they offload, and on CPU ranks all that they hold. Counts parameters, gradients and
    master weights; moments and activations are known later."""
    sizes = {i: _measure(plan, i, part.module, param_dtype) for i, part in enumerate(parts)}
    needed: dict[int, int] = {}
    room_of: dict[int, int] = {}
    for rank, process in enumerate(ranks.process_of):
        walk = walk_memory(plan, rank, actions[rank], sizes)
        on_cpu = processes[process].device != "cuda"
        room_of[rank] = processes[process].host_room_bytes
        needed[rank] = walk.host_peak_bytes + (walk.device_peak_bytes if on_cpu else 0)
    ranks_of: defaultdict[str, list[int]] = defaultdict(list)
    for rank, process in enumerate(ranks.process_of):
        ranks_of[processes[process].node].append(rank)
    for node, own in ranks_of.items():
        total, room = sum(needed[rank] for rank in own), min(room_of[rank] for rank in own)
        if total > room:
            listed = ", ".join(f"rank {rank}: {needed[rank] / GIB:.2f}" for rank in own)
            raise ConfigError(
                f"the plan puts at least {total / GIB:.2f} GiB into the host memory of node '{node}' "
                f"({listed}), which has {room / GIB:.2f} GiB left: offload less there, give its ranks fewer "
                "layers, or train a smaller model"
            )


def _measure(plan: Plan, index: int, module: nn.Module, param_dtype: torch.dtype | None) -> MinistageBytes:
    """The sizes of a ministage on one rank of its group, from its parameters' shapes."""
    group = plan.group_of(index)
    num_shards = count_shards(group.zero, len(group.flat_ranks))
    whole = gradients = masters = 0
    for parameter in module.parameters():
        dtype = param_dtype if param_dtype and parameter.is_floating_point() else parameter.dtype
        one = ParameterBytes(dtype.itemsize)
        whole += parameter.numel() * one.weight
        if parameter.requires_grad:
            gradients += parameter.numel() * one.gradient
            masters += parameter.numel() * one.state
    return MinistageBytes(
        gathered_bytes=whole,
        shard_bytes=whole // num_shards,
        gradient_bytes=gradients,
        gradient_shard_bytes=gradients // num_shards,
        state_bytes=masters // num_shards,
        masters=masters > 0,
    )
