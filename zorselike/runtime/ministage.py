"""One ministage on one rank: its layers, sharded over its group by FSDP2.

The only class that knows how parameters are sharded. Everything is FSDP2's public API; what
each call yields, and the traps, were measured (collectives are counted in the tests).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from zorselike.plan.errors import ConfigError
from zorselike.plan.plan import Group
from zorselike.runtime._compat import reduces_unused_parameters
from zorselike.runtime.boundaries import Boundary
from zorselike.runtime.ranks import ProcessGroup
from zorselike.runtime.touch import touch

Tensors = tuple[Tensor, ...]


class _Unit:
    """A module that is gathered and reduced as one; replaces the module's `forward`."""

    def __init__(self, name: str, module: nn.Module, nested: Sequence[nn.Module], *, recompute: bool) -> None:
        inside_others = {id(m) for other in nested for m in other.modules()}
        self.name = name
        self.module = module
        self._slots = [
            (owner, key)
            for owner in module.modules()
            if id(owner) not in inside_others
            for key, value in owner._parameters.items()
            if value is not None
        ]
        self.owns_parameters = bool(self._slots)
        self.trains = any(p.requires_grad for p in self.parameters())
        self.touches_real_forwards = False
        self.is_touching = False
        forward: Callable[..., Any] = module.forward
        self._compute = partial(checkpoint, forward, use_reentrant=False) if recompute else forward
        self._pass_through: Callable[[Tensor], Tensor] = lambda x: x
        module.forward = self._forward

    def parameters(self) -> list[Tensor]:
        """The unit's own parameters as they are registered now: whole while gathered."""
        found = (owner._parameters[key] for owner, key in self._slots)
        return [p for p in found if p is not None]

    def trainable_parameters(self) -> list[Tensor]:
        return [p for p in self.parameters() if p.requires_grad]

    def chain(self, units: Sequence[_Unit]) -> None:
        """Makes touching this unit (a ministage's root) touch `units` in order."""

        def pass_through(x: Tensor) -> Tensor:
            for unit in units:
                x = unit.module(x)
            return x

        self._pass_through = pass_through

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_touching:
            # A copy: FSDP warns of modules that return a view, or their input itself.
            return touch(self._pass_through(args[0]).clone(), self.trainable_parameters())
        outputs = self._compute(*args, **kwargs)
        if self.touches_real_forwards and torch.is_grad_enabled():
            return touch(outputs, self.trainable_parameters())
        return outputs


class ShardedMinistage:
    """Layers of one ministage, their parameters sharded over the ranks of its group.

    `receives_grad` says whether its inputs carry gradients (false for the lowest ministage
    with a backward). With ZeRO 1 and 2 `unshard` and `reshard` gather and free it, with ZeRO 3
    `forward` and `backward` do so layer by layer, with ZeRO 0 it is always whole.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_names: Sequence[str],
        *,
        group: Group,
        mesh: DeviceMesh,
        device: torch.device,
        receives_grad: bool,
        param_dtype: torch.dtype | None,
        materialise: Callable[[nn.Module, str], None],
    ) -> None:
        self.module = module
        self._group = group
        self._device = device
        self._receives_grad = receives_grad
        self._gathered_by_schedule = group.zero in (1, 2)
        self._reduces_in_backward = group.zero == 3
        recompute = group.recompute == "layer"
        unit_modules = [module.get_submodule(name) for name in unit_names]
        self._units = [
            _Unit(name, unit, (), recompute=recompute and _is_layer(name))
            for name, unit in zip(unit_names, unit_modules, strict=True)
        ]
        self._root = _Unit("", module, unit_modules, recompute=recompute and not unit_names)
        self._root.chain(self._units)
        self._shard(mesh, param_dtype, materialise)
        self._set_prefetch()
        self._ordered: list[_Unit] = []
        """Units to be called once each, in this order."""
        self._next_in_order = 0
        if self._reduces_in_backward and len(group.flat_ranks) > 1:
            self._watch_order()
        self._handles: list[Any] = []
        self._sync_state: bool | None = None
        self._inputs: dict[int, Tensors] = {}
        self._outputs: dict[int, Tensors] = {}

    # -- construction ----------------------------------------------------------------------

    def _shard(
        self,
        mesh: DeviceMesh,
        param_dtype: torch.dtype | None,
        materialise: Callable[[nn.Module, str], None],
    ) -> None:
        """Materialises one unit at a time and shards it before the next, so that a rank never
        holds more than one whole unit of a model that began on meta."""
        computes_in = {param_dtype or p.dtype for p in self.module.parameters() if p.requires_grad}
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype,
            # Without an explicit fp32, torch before 2.15 accumulates microbatches in bf16.
            reduce_dtype=torch.float32 if computes_in & {torch.bfloat16, torch.float16} else None,
        )
        whole = [unit for unit in self._units if unit.owns_parameters]
        for unit in [*self._units, self._root]:
            materialise(unit.module, unit.name)
            if unit.owns_parameters or unit is self._root:
                fully_shard(
                    unit.module, mesh=mesh, mp_policy=policy, reshard_after_forward=self._reduces_in_backward
                )
        owners = [*whole, self._root] if self._root.owns_parameters else whole
        self._owners = owners
        self._sharded: list[FSDPModule] = [_as_fsdp(unit.module) for unit in owners]
        for fsdp in {id(m): m for m in [*self._sharded, _as_fsdp(self.module)]}.values():
            # Rows, not ranks, weigh a gradient: the loss is a sum over the global batch.
            fsdp.set_gradient_divide_factor(1.0)
            fsdp.set_force_sum_reduction_for_comms(True)
        self._fsdp_root = _as_fsdp(self.module)
        if self._reduces_in_backward:
            for unit in owners:
                if unit.trains and not reduces_unused_parameters(_as_fsdp(unit.module)):
                    unit.touches_real_forwards = True

    def _set_prefetch(self) -> None:
        """Gathers happen where the schedule says: FSDP's guess at the order is wrong as soon as
        several forwards precede a backward, or an evaluation came between. A list of the unit
        itself turns it off; with ZeRO 3 it names the unit that the backward visits next."""
        self._fsdp_root.set_modules_to_backward_prefetch([self._fsdp_root])
        takes_part = self._receives_grad
        previous: FSDPModule | None = None
        for unit in self._units:
            if not unit.owns_parameters:
                continue
            current = _as_fsdp(unit.module)
            use_previous = self._reduces_in_backward and previous is not None and takes_part
            current.set_modules_to_backward_prefetch([previous if use_previous and previous else current])
            takes_part = takes_part or unit.trains
            previous = current

    def _watch_order(self) -> None:
        """With ZeRO 3 every rank gathers as its layers are called: one that leaves out a layer must
        not meet the others in another layer's gather."""
        self._ordered = [unit for unit in self._units if unit.owns_parameters]
        for position, unit in enumerate(self._ordered):
            unit.module.register_forward_pre_hook(partial(self._check_turn, position), prepend=True)

    def _check_turn(self, position: int, *_: Any) -> None:
        if position != self._next_in_order:
            raise self._out_of_order(position)
        self._next_in_order += 1

    def _out_of_order(self, position: int) -> ConfigError:
        due, called = self._next_in_order, position
        what = f"left out '{self._ordered[due].name}'" if due < called else "called a layer twice"
        return ConfigError(
            f"a forward {what}; zero = 3 gathers layer by layer, so each must be called once for every "
            "microbatch, in one order: set zero = 2 for this group"
        )

    def warm_up(self) -> None:
        """Gathers once and lets FSDP find its root, on every rank alike: afterwards a rank
        without rows can take part in collectives, and communicators exist."""
        self.unshard()
        self._wait_gathered()
        with torch.no_grad():
            self._touch(requires_grad=False)
        self._reshard_all()

    # -- residency -------------------------------------------------------------------------

    def unshard(self) -> None:
        """Starts the all-gathers, one a unit, in the order in which layers compute."""
        self._handles = [fsdp.unshard(async_op=True) for fsdp in self._sharded]

    def reshard(self) -> None:
        """Frees gathered parameters; a gather that nobody used is waited for first, since FSDP
        would otherwise skip the next one."""
        self._wait_gathered()
        self._reshard_all()

    def _wait_gathered(self) -> None:
        for handle in self._handles:
            if handle is not None:
                handle.wait()
        self._handles = []

    def _reshard_all(self) -> None:
        for fsdp in self._sharded:
            fsdp.reshard()

    # -- compute ---------------------------------------------------------------------------

    def forward(self, number: int, inputs: Tensors, kwargs: Mapping[str, Any], *, train: bool) -> Any:
        """Runs one microbatch; with `train` keeps what its backward needs under `number`."""
        self._next_in_order = 0
        outputs = self.module(*inputs, **kwargs)
        if self._next_in_order < len(self._ordered):
            raise self._out_of_order(len(self._ordered))
        if train:
            self._inputs[number] = inputs
        return outputs

    def keep_outputs(self, number: int, outputs: Tensors) -> None:
        """What `backward` of this microbatch starts from: the outputs, or the loss."""
        self._outputs[number] = outputs

    def backward(self, number: int, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Backward of one microbatch; returns the gradients of its inputs (None: carries none)."""
        inputs, outputs = self._inputs.pop(number), self._outputs.pop(number)
        self._synchronise(self._reduces_in_backward)
        due = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        torch.autograd.backward([out for out, _ in due], [grad for _, grad in due])
        return tuple(_input_grad(entry) for entry in inputs)

    def dummy_forward(self, number: int, *, train: bool) -> None:
        """Joins a ZeRO 3 microbatch's gathers without computing."""
        if train:
            self._outputs[number] = (self._touch(requires_grad=self._receives_grad),)
        else:
            self._touch(requires_grad=False)

    def dummy_backward(self, number: int) -> None:
        """Joins a ZeRO 3 microbatch's gathers and reductions without computing."""
        (output,) = self._outputs.pop(number)
        self._synchronise(True)
        if output.requires_grad:
            torch.autograd.backward(output, torch.zeros_like(output))

    def reduce(self) -> None:
        """Sums the gradients over the group: one backward that touches every trainable parameter
        with a zero gradient, so that ranks with fewer or no microbatches, and parameters that a
        step did not use, take part alike."""
        self._wait_gathered()
        self._synchronise(True)
        output = self._touch(requires_grad=True)
        torch.autograd.backward(output, torch.zeros_like(output))

    def _touch(self, *, requires_grad: bool) -> Tensor:
        self._next_in_order = 0
        x = torch.zeros(1, device=self._device, requires_grad=requires_grad)
        with self._touching():
            touched: Tensor = self.module(x)
        return touched

    @contextmanager
    def _touching(self) -> Iterator[None]:
        units = [*self._units, self._root]
        for unit in units:
            unit.is_touching = True
        try:
            yield
        finally:
            for unit in units:
                unit.is_touching = False

    def _synchronise(self, reduce_now: bool) -> None:
        """Whether the next backward reduces, frees the parameters and ends FSDP's iteration."""
        if self._sync_state is reduce_now:
            return
        self._sync_state = reduce_now
        keeps_gathered = self._group.grad_reduce == "microbatch" and self._gathered_by_schedule
        self._fsdp_root.set_requires_gradient_sync(reduce_now)
        self._fsdp_root.set_reshard_after_backward(reduce_now and not keeps_gathered)
        self._fsdp_root.set_is_last_backward(reduce_now)

    # -- parameters ------------------------------------------------------------------------

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Sharded parameters under their global names, in model order."""
        return list(self.module.named_parameters())

    def local_grads(self) -> list[Tensor]:
        """This rank's shards of the reduced gradients."""
        return [local_tensor(p.grad) for p in self.module.parameters() if p.grad is not None]

    def gather_state(self, group: ProcessGroup, giver: int) -> dict[str, Tensor]:
        """Collective over the ministage's ranks: `{name: whole CPU tensor}` on process `giver`,
        `{}` elsewhere. `group` is their Gloo group. (`DTensor.full_tensor` caches meshes across
        pipelines, with groups that a closed one has destroyed.)"""
        state = {}
        for name, tensor in self.module.state_dict().items():
            whole = _gather_shards(tensor.detach(), group, giver, is_sharded=not self.is_replicated)
            if whole is not None:
                state[name] = whole
        return state

    @property
    def is_replicated(self) -> bool:
        """Whether every rank of the group holds every gradient (ZeRO 0)."""
        return self._group.zero == 0

    def zero_grad(self) -> None:
        """Drops the gradients: a second reduction would add to them."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def forget_activations(self) -> None:
        """Drops what an unfinished step kept."""
        self._inputs.clear()
        self._outputs.clear()


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gather_shards(tensor: Tensor, group: ProcessGroup, giver: int, *, is_sharded: bool) -> Tensor | None:
    """The whole of a tensor on process `giver`; FSDP2 shards dimension 0 as `torch.chunk` does."""
    local = local_tensor(tensor).to("cpu", copy=True)
    if not is_sharded or not isinstance(tensor, DTensor):
        return local if dist.get_rank() == giver else None
    num_ranks = dist.get_world_size(group)
    padded = local.new_zeros((-(-tensor.shape[0] // num_ranks), *tensor.shape[1:]))
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in range(num_ranks)] if dist.get_rank() == giver else None
    dist.gather(padded, parts, dst=giver, group=group)
    return None if parts is None else torch.cat(parts)[: tensor.shape[0]]


def leaf_inputs(tensors: Tensors, boundary: Boundary, *, train: bool) -> Tensors:
    """Fresh autograd leaves of what enters a ministage."""
    return tuple(
        tensor.detach().requires_grad_(train and spec.requires_grad)
        for tensor, spec in zip(tensors, boundary.tensors, strict=True)
    )


def _input_grad(tensor: Tensor) -> Tensor | None:
    if not tensor.requires_grad:
        return None
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _is_layer(name: str) -> bool:
    """Whether a unit is one of a container's numbered layers (the ones worth recomputing)."""
    return name.rpartition(".")[2].isdigit()


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule), f"{type(module).__name__} is not sharded"
    return module
