"""Settings of a ministage, and the resources that all ministages of a rank share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from zorselike.plan.plan import Group
from zorselike.runtime.memory.activation_offload import ActivationOffload
from zorselike.runtime.memory.host_backed import DeferredFrees, PendingOffloads
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.memory.streams import make_streams
from zorselike.runtime.ministage.busy import BusyClock
from zorselike.runtime.ministage.random_numbers import RandomNumbers
from zorselike.runtime.tensor_parallel.pieces import TensorParallel


@dataclass(frozen=True)
class RankResources:
    """Memory, offload and deferred frees of one rank, shared by its ministages."""

    memory: Memory
    busy: BusyClock
    activations: ActivationOffload | None = None
    """Where activations wait for their backward, if the plan offloads them."""
    pending_shards: PendingOffloads = field(default_factory=PendingOffloads)
    pending_state: PendingOffloads = field(default_factory=PendingOffloads)
    deferred_frees: DeferredFrees = field(default_factory=DeferredFrees)
    """Of all ministages together; settled before each reduction and update, and at the end of a step."""
    reducing: DeferredFrees = field(default_factory=DeferredFrees)
    """Whole gradients of the newest reduction; settled before the next, and at the end of a step."""
    random: RandomNumbers | None = None
    """What seeds modules before they compute."""
    fsdp_roots: list[FSDPModule] = field(default_factory=list)
    """The ministages as FSDP2 has them; they share its streams, and with them its pools of memory."""

    @classmethod
    def of(
        cls,
        device: torch.device,
        *,
        offloads_activations: bool = False,
        compiles: bool = False,
        seed: int | None = None,
    ) -> RankResources:
        memory = Memory.of(device, make_streams(device))
        return cls(
            memory,
            BusyClock(device),
            ActivationOffload(memory, keeps_strides=compiles) if offloads_activations else None,
            random=None if seed is None else RandomNumbers(seed, device),
        )


@dataclass(frozen=True, kw_only=True)
class MinistageSettings:
    """How one ministage is sharded and run; the defaults are those of one that stands alone."""

    group: Group
    mesh: DeviceMesh
    """Mesh of the group's ranks."""
    materialise: Callable[[nn.Module, str], None]
    """Gives a module, by its global name, its values on the device."""
    modules: Sequence[str] = ()
    """The plan's names of its modules; those that are no units share weights."""
    receives_grad: bool = False
    """Whether its inputs carry gradients: not those of the lowest ministage with a backward."""
    param_dtype: torch.dtype | None = None
    """Dtype in which it computes; None: the model's own."""
    compiles: bool = False
    keeps_shards: bool = True
    """Whether its shards stay on the device though the plan offloads parameters."""
    tied: Collection[str] = ()
    """Weights that other ministages hold too; their shards always stay on the device."""
    borrowed: Collection[str] = ()
    """Weights that another ministage's optimizer updates."""
    tensor_parallel: TensorParallel | None = None
    """How layers are cut, if the group has tensor-parallel replicas."""
