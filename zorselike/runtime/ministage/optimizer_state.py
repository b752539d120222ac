"""Optimizer state: fp32 master weights and moments, on the device or the host.

FSDP2 has no master weights: its mixed precision casts fp32 shards for each gather, so that these would
have to be loaded whole. Here a gather moves 2 bytes a parameter, and the fp32 weights move with the
moments, only for an update.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zorselike.cost.purposes import Purpose
from zorselike.errors import ConfigError
from zorselike.runtime._compat import has_step_hooks
from zorselike.runtime.memory.host_backed import HostBackedParts, HostBackedTensors
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.memory.streams import Event
from zorselike.runtime.ministage.gradients import HALF
from zorselike.runtime.ministage.settings import RankResources
from zorselike.runtime.ministage.sharding import local_rows, local_tensor

MOMENTS_OF_ADAM = 2

ELEMENTWISE = frozenset(
    (
        torch.optim.Adadelta,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
)
"""Optimizers to which no element of a parameter matters to another; not what is derived from them."""


class OptimizerState(HostBackedParts):
    """The state of one ministage's optimizer.

    `masters` are its fp32 parameters where the layers compute in less, by global name; they may be
    on the host already, as `host_backed_masters` (one a unit) say. Moments are found after each update, so
    that any optimizer's are.
    """

    def __init__(
        self,
        masters: Mapping[str, nn.Parameter],
        host_backed_masters: list[HostBackedTensors],
        resources: RankResources,
        *,
        offload: bool,
    ) -> None:
        self.masters = masters
        self._optimizer: Optimizer | None = None
        self._host_backed_masters = host_backed_masters
        self._moments: HostBackedTensors | None = None
        self._known: dict[Hashable, ReferenceType[Tensor]] = {}
        """The moments that were found last. Not their ids, which those that take their place may get."""
        self._memory, self._pending = resources.memory, resources.pending_state
        self.offloads = offload
        """Whether it is on the host between updates."""
        self._entered_bytes = 0

    def attach(self, optimizer: Optimizer) -> None:
        """The optimizer whose moments are meant."""
        self._optimizer = optimizer
        optimizer.register_state_dict_pre_hook(self._refuse_on_host)
        optimizer.register_load_state_dict_post_hook(self._copy_loaded_state)

    def _copy_loaded_state(self, optimizer: Optimizer) -> None:
        """A loaded state may be the caller's own tensors, whose memory is not ours to give up."""
        if self.offloads:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        state[key] = value.clone()

    def _refuse_on_host(self, _: Optimizer) -> None:
        if not self.is_on_device:
            raise ConfigError(
                "the state of this optimizer is in host memory between steps; read it inside "
                "`with pipe.loaded():`, and copy what is to outlast that"
            )

    def host_backed(self) -> list[HostBackedTensors]:
        return [*self._host_backed_masters, *([self._moments] if self._moments else [])]

    def offload(self, updated: Event) -> None:
        """Starts its way to the host after an update."""
        gone = updated
        for tensors in self.host_backed():
            gone = tensors.store(updated)
        self._pending.add(self.host_backed(), gone)

    def find_moments(self) -> None:
        """After an update: takes in moments that are new."""
        moments = dict(self._find())
        if not self.offloads:
            num_bytes = sum(moment.nbytes for moment in moments.values())
            self._memory.ledger.hold(Purpose.OPTIMIZER_STATE, "device", num_bytes - self._entered_bytes)
            self._entered_bytes = num_bytes
            return
        if moments.keys() == self._known.keys() and all(
            self._known[key]() is moments[key] for key in moments
        ):
            return
        streams = self._memory.streams
        if self._moments is not None:
            self._moments.discard(streams.update.record())
        self._known = {key: ref(moment) for key, moment in moments.items()}
        # An update may have allocated them, or the optimizer's constructor, or an earlier load.
        self._moments = HostBackedTensors(
            moments,
            purpose=Purpose.OPTIMIZER_STATE,
            memory=self._memory,
            homes=[streams.update, streams.compute, streams.load_state],
            inbound=self._memory.streams.load_state,
        )

    @property
    def moment_bytes(self) -> int:
        """Bytes of the moments; 0 before the first update."""
        return self._moments.num_bytes if self._moments is not None else self._entered_bytes

    def _find(self) -> Iterator[tuple[Hashable, Tensor]]:
        """Every tensor of the optimizer's state that is as large as a parameter's shard may be."""
        if self._optimizer is None:  # All that trains here is borrowed.
            return
        others = {
            local_tensor(tensor.detach()).untyped_storage().data_ptr()
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for tensor in (parameter, parameter.grad)
            if tensor is not None
        }
        """Memory of parameters and gradients, which a state may refer to."""
        for number, state in enumerate(self._optimizer.state.values()):
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor) and value.dim():
                    local = local_tensor(value)
                    is_own = local.untyped_storage().data_ptr() not in others
                    if is_own and local.numel() and local.device.type == self._memory.device.type:
                        yield (number, key), local

    @property
    def is_on_device(self) -> bool:
        return all(tensors.is_on_device for tensors in self.host_backed())


def take_local(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Gives an optimizer this rank's rows of its parameters, as plain tensors of the same memory, and
    returns them by name; `trained` as it is if the optimizer may look at whole parameters or has a state, and
    if it has hooks, which may know the parameters that its factory was given.

    DTensors cost the host time with each operation of an update, most of it in the first one, which finds
    out where results will be (`STEP` of `tools/bench_runtime.py --only overhead`: 7.2 ms, without them 2.1).
    """
    if type(optimizer) not in ELEMENTWISE or optimizer.state or has_step_hooks(optimizer):
        return dict(trained)
    local = {name: nn.Parameter(local_tensor(parameter.detach())) for name, parameter in trained.items()}
    local_of = {id(parameter): local[name] for name, parameter in trained.items()}
    for group in optimizer.param_groups:
        group["params"] = [local_of.get(id(parameter), parameter) for parameter in group["params"]]
        # As for DTensors: what torch takes for plain tensors on a GPU needs, as its documentation says,
        # about as much memory again as these, and no plan counts that.
        if group.get("foreach") is None and not group.get("fused"):
            group["foreach"] = False
    return local


def count_moments(optimizer: Optimizer) -> int:
    """How many tensors of a parameter's shape an optimizer keeps for each, from its settings: Adam's
    two where they do not tell."""
    settings = optimizer.defaults
    if "betas" in settings:
        return MOMENTS_OF_ADAM + bool(settings.get("amsgrad"))
    if "momentum" in settings:
        return 1 if settings["momentum"] else 0
    return MOMENTS_OF_ADAM


def knows_moments(optimizer: Optimizer) -> bool:
    """Whether `count_moments` is certain, and they are as large as their parameters."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.SGD)


def take_masters(
    named: Sequence[tuple[str, nn.Parameter]],
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None,
    borrowed: Collection[str],
) -> dict[str, Tensor]:
    """Turns whole parameters into the dtype that they compute in; what trains in half precision, and is
    not borrowed, leaves this rank's fp32 rows behind, by global name."""
    masters: dict[str, Tensor] = {}
    for name, parameter in named:
        dtype = param_dtype if param_dtype and parameter.is_floating_point() else parameter.dtype
        if dtype in HALF and parameter.requires_grad and name not in borrowed:
            masters[name] = local_rows(parameter, mesh).to(torch.float32, copy=True).contiguous()
        parameter.data = parameter.data.to(dtype)
    return masters


def place_masters(local: Mapping[str, Tensor], memory: Memory, *, offload: bool) -> list[HostBackedTensors]:
    """Enters a unit's master weights in the ledger, and offloads them if `offload`."""
    if not offload:
        num_bytes = sum(rows.nbytes for rows in local.values())
        memory.ledger.hold(Purpose.OPTIMIZER_STATE, "device", num_bytes)
        return []
    compute = memory.streams.compute
    tensors = HostBackedTensors(
        local,
        purpose=Purpose.OPTIMIZER_STATE,
        memory=memory,
        homes=[compute],
        inbound=memory.streams.load_state,
    )
    tensors.free(tensors.store(compute.record()))
    return [tensors]
