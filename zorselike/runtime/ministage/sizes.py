"""Bytes of the parts of a ministage on one rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from zorselike.cost.parameter_bytes import FP32_BYTES, ParameterBytes
from zorselike.runtime.ministage.sharding import local_tensor
from zorselike.runtime.ministage.shards import NamedParameters


@dataclass(frozen=True)
class Sizes:
    """Bytes of one ministage's parts."""

    gathered_bytes: int
    """All parameters, whole, in the dtype that they are gathered in."""
    shard_bytes: int
    """This rank's shards, with FSDP2's padding."""
    kept_shard_bytes: int
    """Part of `shard_bytes` that belongs to tied weights, which never leave the device."""
    gradient_bytes: int
    """Whole gradients, as they are added up."""
    gradient_shard_bytes: int
    """This rank's reduced gradients."""
    master_bytes: int
    """This rank's fp32 master weights."""
    trained_bytes: int
    """One tensor for each parameter that this rank's optimizer updates, such as one moment."""
    largest_unit_bytes: int
    largest_unit_gradient_bytes: int


def measure(
    units: Sequence[NamedParameters], *, kept: Collection[str], masters: Mapping[str, nn.Parameter]
) -> Sizes:
    """`units`: the sharded parameters of each FSDP unit by global name; `kept`: tied weights."""
    everything = [(name, p) for unit in units for name, p in unit]
    stored = {name: local_tensor(p.detach()).untyped_storage().nbytes() for name, p in everything}
    whole = [sum(p.numel() * p.itemsize for _, p in unit) for unit in units]
    gradients = [
        sum(p.numel() * ParameterBytes(p.itemsize).gradient for _, p in unit if p.requires_grad)
        for unit in units
    ]
    trained = [(name, p) for name, p in everything if p.requires_grad]
    local = {name: local_tensor(p.detach()).numel() for name, p in trained}
    reduced = sum(local[name] * ParameterBytes(p.itemsize).gradient for name, p in trained)
    return Sizes(
        gathered_bytes=sum(whole),
        shard_bytes=sum(stored.values()),
        kept_shard_bytes=sum(num_bytes for name, num_bytes in stored.items() if name in kept),
        gradient_bytes=sum(gradients),
        gradient_shard_bytes=reduced,
        master_bytes=sum(FP32_BYTES * local[name] for name in masters),
        trained_bytes=reduced,
        largest_unit_bytes=max(whole, default=0),
        largest_unit_gradient_bytes=max(gradients, default=0),
    )
