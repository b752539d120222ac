"""What all ranks must agree on before they work together; the same error on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zorselike.errors import ConfigError, PlanError
from zorselike.plan.plan import Plan
from zorselike.text.wording import list_few

SETTINGS = ("max_norm", "clip", "seed", "param_dtype", "dynamic_shapes")
"""Arguments of a pipeline that have to be the same on all ranks."""
_SAMPLED = 512
"""Elements of a sample, a row at least."""


def check_same(plan: Plan, model: nn.Module, settings: Mapping[str, object]) -> None:
    """Raises `PlanError` where processes run different plans (an old copy on one node, say) and `ConfigError`
    where they have different settings, by the names of arguments, or models: other parameters, or, where a
    model has weights already, other weights. Collective over all processes."""
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    try:
        _check_same_plan(plan, group)
        _check_same_settings(settings, group)
        _check_same_weights(model, group)
        _check_same_parameters(model, group)
    finally:
        dist.destroy_process_group(group)


def _check_same_plan(plan: Plan, group: dist.ProcessGroup) -> None:
    everyone = _gather(torch.tensor([int(plan.fingerprint, 16)], dtype=torch.int64, device="cpu"), group)
    found = [format(int(value), "012x") for value in everyone[:, 0]]
    others = [process for process, fingerprint in enumerate(found) if fingerprint != found[0]]
    if others:
        raise PlanError(
            f"process {others[0]} runs plan {found[others[0]]}, process 0 runs plan {found[0]}; "
            "copy the same plan file to every node"
        )


def _check_same_settings(own: Mapping[str, object], group: dist.ProcessGroup) -> None:
    everyone: list[Mapping[str, object]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(own), group=group)
    for process, settings in enumerate(everyone):
        for name, value in settings.items():
            if value != everyone[0][name]:
                raise ConfigError(
                    f"process {process} was given {name}={value!r}, process 0 {name}={everyone[0][name]!r}; "
                    "give all ranks the same"
                )


def _check_same_parameters(model: nn.Module, group: dist.ProcessGroup) -> None:
    found = _gather(torch.tensor([digest_parameters(model)], device="cpu"), group)[:, 0].tolist()
    others = [process for process, other in enumerate(found) if other != found[0]]
    if others:
        raise ConfigError(
            f"the model of process {others[0]} has other parameters than that of process 0, or others that "
            "require no gradient; build it, and freeze it, alike on every rank"
        )


def digest_parameters(model: nn.Module) -> int:
    """Of names, shapes, dtypes, and whether they train."""
    told = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=7).digest(), "little")


def _check_same_weights(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Compares the sum of a few elements of each tensor, so that weights that are mapped from a file are not
    read whole; tensors on the meta device are initialised alike and skipped."""
    named = [(name, p) for name, p in model.named_parameters() if not p.is_meta]
    sums = torch.tensor([_sum_samples(p.detach()) for _, p in named], dtype=torch.float64, device="cpu")
    counts = _gather(torch.tensor([len(named)], device="cpu"), group)[:, 0].tolist()
    if len(set(counts)) > 1:
        raise ConfigError(
            f"the model has weights on some ranks and is on the meta device on others ({counts} tensors "
            "by process); build it alike on every rank"
        )
    if not named:
        return
    everyone = _gather(sums, group)
    # Not bitwise: another kind of CPU may add in another order.
    differs = (everyone - everyone[0]).abs().amax(dim=0) > 1e-9 * everyone[0].abs().clamp_min(1.0)
    if differs.any():
        names = [name for (name, _), is_other in zip(named, differs.tolist(), strict=True) if is_other]
        raise ConfigError(
            f"ranks were given different weights for {list_few(names)}; seed every rank alike, load one "
            "checkpoint on all, or build the model on the meta device and let seed= initialise it"
        )


def _sum_samples(tensor: Tensor) -> float:
    """Over the first, the middle and the last rows of a few hundred elements."""
    if not tensor.dim() or not tensor.shape[0]:
        return float(tensor.sum(dtype=torch.float64))
    num_rows, size = tensor.shape[0], max(1, _SAMPLED // max(1, tensor[0].numel()))
    starts = {0, max(0, num_rows // 2 - size // 2), max(0, num_rows - size)}
    return sum(float(tensor[start : start + size].sum(dtype=torch.float64)) for start in sorted(starts))


def _gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[processes, ...]`, one row a process."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return torch.stack(everyone)
