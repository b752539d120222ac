"""One ministage on one rank: its layers, sharded over its group by FSDP2.

The only class that knows how parameters are sharded. Everything is FSDP2's public API; what
each call yields, and the traps, were measured (collectives are counted in the tests).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zorselike.plan.errors import ConfigError
from zorselike.plan.plan import Group
from zorselike.runtime._compat import reduces_unused_parameters
from zorselike.runtime.boundaries import is_layer
from zorselike.runtime.departures import Departures, Retired
from zorselike.runtime.gradients import HALF, Gradients
from zorselike.runtime.memory import Memory
from zorselike.runtime.mirror import Mirror
from zorselike.runtime.optimizer_state import OptimizerState
from zorselike.runtime.ranks import ProcessGroup
from zorselike.runtime.sharding import local_tensor, master_parameter, own_rows
from zorselike.runtime.shards import Shards
from zorselike.runtime.sizes import Sizes, measure
from zorselike.runtime.stash import Stash
from zorselike.runtime.streams import Event
from zorselike.runtime.unit import Unit, enter

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Rank:
    """What all ministages of a rank share."""

    memory: Memory
    stash: Stash | None
    """Where activations go, if the plan offloads them."""
    leaving_shards: Departures
    leaving_state: Departures
    retired: Retired


class ShardedMinistage:
    """Layers of one ministage, their parameters sharded over the ranks of its group.

    `receives_grad` says whether its inputs carry gradients (false for the lowest ministage
    with a backward). With ZeRO 1 and 2 `unshard` and `reshard` gather and free it, with ZeRO 3
    `forward` and `backward` do so layer by layer, with ZeRO 0 it is always whole.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        unit_names: Sequence[str],
        *,
        group: Group,
        mesh: DeviceMesh,
        rank: Rank,
        receives_grad: bool,
        param_dtype: torch.dtype | None,
        compiles: bool,
        keeps_shards: bool,
        tied: Collection[str],
        borrowed: Collection[str],
        materialise: Callable[[nn.Module, str], None],
    ) -> None:
        """`keeps_shards`: its shards stay on the device though the plan offloads parameters, as those of
        the weights `tied` do. The optimizer has no part in those of `borrowed`."""
        self.index = index
        self.module = module
        self._group = group
        self._rank = rank
        self._streams = rank.memory.streams
        self._device = rank.memory.device
        self._receives_grad = receives_grad
        self._gathered_by_schedule = group.zero in (1, 2)
        self._reduces_in_backward = group.zero == 3
        self._waits_at_once = self._streams.is_concurrent or len(group.flat_ranks) == 1
        recompute = group.recompute == "layer"
        unit_modules = [module.get_submodule(name) for name in unit_names]
        options = partial(Unit, stash=rank.stash)
        self._units = [
            options(
                name, unit, (), recompute=recompute and is_layer(name), compiles=compiles and is_layer(name)
            )
            for name, unit in zip(unit_names, unit_modules, strict=True)
        ]
        self._root = options("", module, unit_modules, recompute=recompute and not unit_names)
        self._root.chain(self._units)
        self._dtypes = {name: p.dtype for name, p in module.named_parameters()}
        """Of the model as it was given."""
        self._prefixes = {id(m): prefix for prefix, m in reversed(list(module.named_modules()))}
        self._shard(mesh, param_dtype, borrowed, materialise)
        self._set_prefetch()
        self._ordered: list[Unit] = []
        """Units to be called once each, in this order."""
        self._next_in_order = 0
        if self._reduces_in_backward and len(group.flat_ranks) > 1:
            self._watch_order()
        if self._streams.is_concurrent:
            for unit in self._owners:
                unit.module.register_forward_pre_hook(partial(self._await_gather, unit), prepend=True)
        self._handles: list[Any] = []
        self._gathered: dict[str, Event] = {}
        """Per unit: the end of its gather, until compute waits for it."""
        self._sync_state: bool | None = None
        self._inputs: dict[int, list[Tensor | None]] = {}
        """Per microbatch: leaves that collect the gradients of its inputs."""
        self._dummies: dict[int, Tensor] = {}
        self._edges: dict[int, list[GradientEdge | None]] = {}
        """Per microbatch: where its backward starts; the outputs themselves are not needed."""
        self._keeps_shards, self._tied = keeps_shards, tied
        named = self._named_by_unit()
        trained = [[(name, p) for name, p in unit if p.requires_grad] for unit in named]
        self.gradients = Gradients(list(zip(self._sharded, trained, strict=True)), rank.memory, rank.retired)
        self.trained = {
            name: self.state.masters.get(name, p)
            for unit in trained
            for name, p in unit
            if name not in borrowed
        }
        """What the optimizer updates, by global name in model order: fp32 masters where there are."""

    # -- construction ----------------------------------------------------------------------

    def _shard(
        self,
        mesh: DeviceMesh,
        param_dtype: torch.dtype | None,
        borrowed: Collection[str],
        materialise: Callable[[nn.Module, str], None],
    ) -> None:
        """Materialises one unit at a time and shards it before the next, so that a rank never
        holds more than one whole unit of a model that began on meta."""
        computes_in = {param_dtype or p.dtype for p in self.module.parameters() if p.requires_grad}
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype,
            # Without an explicit fp32, torch before 2.15 accumulates microbatches in bf16.
            reduce_dtype=torch.float32 if computes_in & {*HALF} else None,
        )
        offloads = "optimizer" in self._group.offload
        masters: dict[str, nn.Parameter] = {}
        mirrors: list[Mirror] = []
        whole = [unit for unit in self._units if unit.owns_parameters]
        for unit in [*self._units, self._root]:
            materialise(unit.module, unit.name)
            local = self._take_masters(unit, mesh, param_dtype, borrowed)
            if unit.owns_parameters or unit is self._root:
                fully_shard(
                    unit.module, mesh=mesh, mp_policy=policy, reshard_after_forward=self._reduces_in_backward
                )
            sharded = dict(self._named_parameters_of(unit))
            masters |= {name: master_parameter(rows, sharded[name]) for name, rows in local.items()}
            mirrors += self._place_masters(local, offloads=offloads)
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
        self.state = OptimizerState(
            masters=masters,
            mirrors=mirrors,
            memory=self._rank.memory,
            departures=self._rank.leaving_state,
            offload=offloads,
        )

    def _take_masters(
        self, unit: Unit, mesh: DeviceMesh, param_dtype: torch.dtype | None, borrowed: Collection[str]
    ) -> dict[str, Tensor]:
        """Turns a whole unit into the dtype that it computes in; what trains in half precision leaves
        this rank's fp32 rows behind. (FSDP2 has no master weights: shards that are cast for each
        gather would have to be loaded whole.)"""
        masters: dict[str, Tensor] = {}
        for name, parameter in self._named_parameters_of(unit):
            dtype = param_dtype if param_dtype and parameter.is_floating_point() else parameter.dtype
            if dtype in HALF and parameter.requires_grad and name not in borrowed:
                masters[name] = own_rows(parameter, mesh).to(torch.float32, copy=True).contiguous()
            parameter.data = parameter.data.to(dtype)
        return masters

    def _place_masters(self, local: Mapping[str, Tensor], *, offloads: bool) -> list[Mirror]:
        memory = self._rank.memory
        if not offloads:
            num_bytes = sum(rows.numel() * rows.itemsize for rows in local.values())
            memory.ledger.hold("optimizer state", "device", num_bytes)
            return []
        mirror = Mirror(
            local,
            purpose="optimizer state",
            memory=memory,
            home=memory.streams.compute,
            inbound=memory.streams.load_state,
        )
        mirror.free(mirror.store(memory.streams.compute.record()))
        return [mirror]

    def _named_parameters_of(self, unit: Unit) -> list[tuple[str, nn.Parameter]]:
        """The unit's own parameters as they are registered now, each once, by global name."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for owner, key, parameter in unit.slots():
            prefix = self._prefixes[id(owner)]
            found.setdefault(id(parameter), (f"{prefix}.{key}" if prefix else key, parameter))
        return list(found.values())

    def _named_by_unit(self) -> list[list[tuple[str, nn.Parameter]]]:
        """The sharded parameters of each unit that owns some."""
        return [self._named_parameters_of(unit) for unit in self._owners]

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
        without rows can take part in collectives, communicators exist, and shards may leave."""
        self._gather()
        self._wait_gathered()
        with torch.no_grad():
            self._touch(requires_grad=False)
        self._reshard_all()
        self.sizes()  # While all storage is there.
        self._shards = Shards(
            self._named_by_unit(),
            kept=self._tied,
            offload="params" in self._group.offload and not self._keeps_shards,
            memory=self._rank.memory,
            departures=self._rank.leaving_shards,
        )
        self._enter_whole()

    def _enter_whole(self) -> None:
        """Enters gathered parameters that no action gathers: all with ZeRO 0, those of two layers
        (one that computes, one that is gathered ahead) with ZeRO 3."""
        if not self._gathered_by_schedule:
            sizes = self.sizes()
            two_layers = min(2 * sizes.largest_unit_bytes, sizes.gathered_bytes)
            num_bytes = sizes.gathered_bytes if self._group.zero == 0 else two_layers
            self._rank.memory.ledger.hold("gathered parameters", "device", num_bytes)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all its parameters, whole, in the dtype that they are gathered in."""
        return self.sizes().gathered_bytes

    def sizes(self) -> Sizes:
        """Bytes of its parts on this rank; the same at any time."""
        if self._sizes is None:
            self._sizes = measure(self._named_by_unit(), kept=self._tied, masters=self.state.masters)
        return self._sizes

    _sizes: Sizes | None = None

    # -- residency -------------------------------------------------------------------------

    def unshard(self) -> None:
        """Starts the all-gathers, one a unit, in the order in which layers compute."""
        self._rank.memory.ledger.hold("gathered parameters", "device", self.gathered_bytes)
        self._gather()

    def _gather(self) -> None:
        """Each unit is gathered and copied out on one stream, and what `reshard` frees returns there.
        FSDP2 orders only gathers that it starts itself; so these begin after all that compute has
        been given, and compute waits for each."""
        gather = self._streams.gather
        gather.wait(self._streams.compute.record())
        self._handles = []
        for position, (unit, fsdp) in enumerate(zip(self._owners, self._sharded, strict=True)):
            if self._shards is not None:
                self._shards.arrive(position, gather)
            with gather.use():
                handle = fsdp.unshard(async_op=True)
                if handle is not None and self._waits_at_once:
                    handle.wait()
                elif handle is not None:
                    self._handles.append(handle)
            if self._streams.is_concurrent:
                self._gathered[unit.name] = gather.record()

    def reshard(self) -> None:
        """Frees gathered parameters; a gather that nobody used is waited for first, since FSDP
        would otherwise skip the next one."""
        self._wait_gathered()
        self._reshard_all()
        self._gathered.clear()
        self._rank.memory.ledger.drop("gathered parameters", "device", self.gathered_bytes)

    def _wait_gathered(self) -> None:
        """Makes compute wait for all gathers."""
        for handle in self._handles:
            handle.wait()
        self._handles = []
        for gathered in self._gathered.values():
            self._streams.compute.wait(gathered)
        self._gathered.clear()

    def _await_gather(self, unit: Unit, *_: Any) -> None:
        """Before a unit computes."""
        gathered = self._gathered.pop(unit.name, None)
        if gathered is not None:
            self._streams.compute.wait(gathered)

    def _reshard_all(self) -> None:
        for fsdp in self._sharded:
            fsdp.reshard()

    # -- between device and host -----------------------------------------------------------

    @property
    def shards(self) -> Shards:
        assert self._shards is not None, "warm_up comes first"
        return self._shards

    _shards: Shards | None = None

    def load_shards(self) -> None:
        """Starts the shards' way to the device."""
        self.shards.load()
        self._shards_due = not self._gathered_by_schedule

    _shards_due = False
    """Whether FSDP2 itself gathers next, on streams of its own: the shards must be there by then."""

    def offload_shards(self) -> None:
        """Frees the shards once they are read; new values go to the host first."""
        readers = self._streams.gather if self._gathered_by_schedule else self._streams.compute
        last_use = readers.record()
        self.shards.offload(last_use)

    def _await_shards(self) -> None:
        if self._shards_due:
            self.shards.arrive_all(self._streams.compute, on_host_too=True)
            self._shards_due = False

    # -- update ----------------------------------------------------------------------------

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, on the update stream, the optimizer's parameters have their gradients and state; then
        shards get the new values, and the gradients go."""
        update = self._streams.update
        update.wait(self._streams.compute.record())
        self.state.arrive(update)
        self.gradients.arrive(update)
        if self.shards.are_away:
            self.shards.make_room(update)
        self.shards.arrive_all(update)
        self.gradients.assign(self.trained)
        with update.use():
            yield
            self._publish()
            self.state.find_moments()
        updated = update.record()
        self.shards.note_update(updated)
        self.gradients.drop(self.trained, updated)
        self._updated = updated

    _updated: Event | None = None

    def _publish(self) -> None:
        """Rounds the master weights into the shards."""
        if self.state.masters:
            sharded = dict(self.named_parameters())
            for name, master in self.state.masters.items():
                local_tensor(sharded[name].detach()).copy_(local_tensor(master.detach()))

    def offload_state(self) -> None:
        """Starts the optimizer state's way to the host after the update."""
        assert self._updated is not None, "an update comes first"
        self.state.offload(self._updated)

    def await_update(self) -> None:
        """Makes compute wait for the update."""
        if self._updated is not None:
            self._streams.compute.wait(self._updated)

    # -- compute ---------------------------------------------------------------------------

    def keeping(self, number: int) -> AbstractContextManager[None]:
        """What a microbatch's forward, and its loss, save inside is for the stash, if there is one."""
        stash = self._rank.stash
        return nullcontext() if stash is None else stash.keeping((self.index, number))

    def forward(
        self,
        number: int,
        inputs: Tensors,
        carries_grad: Sequence[bool],
        kwargs: Mapping[str, Any],
        *,
        train: bool,
    ) -> Any:
        """Runs one microbatch; with `train` keeps what its backward needs under `number`.

        `carries_grad`: which inputs a gradient is wanted of.
        """
        self._await_shards()
        self._next_in_order = 0
        if train:
            inputs = self._enter(number, inputs, carries_grad)
        outputs = self.module(*inputs, **kwargs)
        if self._next_in_order < len(self._ordered):
            raise self._out_of_order(len(self._ordered))
        return outputs

    def _enter(self, number: int, inputs: Tensors, carries_grad: Sequence[bool]) -> Tensors:
        """Fresh autograd leaves of what enters."""
        leaves: list[Tensor | None] = []
        entered = []
        for tensor, carries in zip(inputs, carries_grad, strict=True):
            leaf = None
            if not carries:
                tensor = tensor.detach()
            elif self._rank.stash is None:
                tensor = leaf = tensor.detach().requires_grad_()
            else:
                leaf, tensor = enter(tensor)
            leaves.append(leaf)
            entered.append(tensor)
        self._inputs[number] = leaves
        return tuple(entered)

    def keep_outputs(self, number: int, outputs: Tensors) -> None:
        """What `backward` of this microbatch starts from: the outputs, or the loss."""
        self._edges[number] = [get_gradient_edge(out) if out.requires_grad else None for out in outputs]

    def backward(self, number: int, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Backward of one microbatch; returns the gradients of its inputs (None: carries none)."""
        leaves, edges = self._inputs.pop(number), self._edges.pop(number)
        self._prepare_backward()
        stash, key = self._rank.stash, (self.index, number)
        if stash is not None:
            stash.arrive(key)
        self._synchronise(self._reduces_in_backward)
        due = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge is not None]
        torch.autograd.backward([edge for edge, _ in due], [grad for _, grad in due])
        self._collect_reduced()
        if stash is not None:
            del edges, due
            stash.drop(key)
        return tuple(map(_input_grad, leaves))

    def _prepare_backward(self) -> None:
        """Parameters are there, and, where a backward reduces, last reductions' results are used up."""
        self._await_shards()
        self._wait_gathered()
        if self._reduces_in_backward:
            self._rank.retired.settle()

    def _collect_reduced(self) -> None:
        if self._reduces_in_backward:
            self.gradients.collect()

    def dummy_forward(self, number: int, *, train: bool) -> None:
        """Joins a ZeRO 3 microbatch's gathers without computing."""
        self._await_shards()
        if train:
            self._dummies[number] = self._touch(requires_grad=self._receives_grad)
        else:
            self._touch(requires_grad=False)

    def dummy_backward(self, number: int) -> None:
        """Joins a ZeRO 3 microbatch's gathers and reductions without computing."""
        output = self._dummies.pop(number)
        self._prepare_backward()
        self._synchronise(True)
        if output.requires_grad:
            torch.autograd.backward(output, torch.zeros_like(output))
            self._collect_reduced()

    def reduce(self) -> None:
        """Sums the gradients over the group: one backward that touches every trainable parameter
        with a zero gradient, so that ranks with fewer or no microbatches, and parameters that a
        step did not use, take part alike."""
        self._await_shards()
        self._wait_gathered()
        self._rank.retired.settle()
        self._synchronise(True)
        output = self._touch(requires_grad=True)
        torch.autograd.backward(output, torch.zeros_like(output))
        self.gradients.collect()

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

    def gather_state(self, group: ProcessGroup, giver: int) -> dict[str, Tensor]:
        """Collective over the ministage's ranks: `{name: whole CPU tensor}` on process `giver`,
        `{}` elsewhere: master weights where there are. `group` is their Gloo group.
        (`DTensor.full_tensor` caches meshes across pipelines, with groups that a closed one has
        destroyed.)"""
        state = {}
        first_name: dict[int, str] = {}
        canonical = {
            name: first_name.setdefault(id(parameter), name)
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }
        for name, tensor in self.module.state_dict().items():
            own_name = canonical.get(name, name)
            local = self._value_on_host(own_name, tensor.detach())
            is_sharded = isinstance(tensor, DTensor) and not self.is_replicated
            whole = _gather_shards(local, tensor, group, giver, is_sharded=is_sharded)
            if whole is not None:
                state[name] = whole.to(self._dtypes.get(own_name, whole.dtype))
        return state

    def _value_on_host(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of this rank's values of a parameter or buffer."""
        local = local_tensor(tensor)
        found = self.state.master_on_host(name)
        if found is None and name in self.state.masters:
            found = local_tensor(self.state.masters[name].detach())
        if found is None:
            found = self.shards.on_host(name, local)
        return (local if found is None else found).to("cpu", copy=True)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Everything is on the device inside, for those who look at it, or change it, between steps."""
        shards_away, state_away = self.shards.are_away, not self.state.is_on_device
        if shards_away:
            self.shards.load()
        if state_away:
            self.state.load()
        compute = self._streams.compute
        self.shards.arrive_all(compute)
        self.state.arrive(compute)
        try:
            yield
        finally:
            done = compute.record()
            if shards_away:
                self.shards.note_update(done)
                self.shards.offload(done)
            if state_away:
                self.state.offload(done)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank of the group holds every gradient (ZeRO 0)."""
        return self._group.zero == 0

    def forget_step(self) -> None:
        """Drops what an unfinished step kept."""
        self._inputs.clear()
        self._edges.clear()
        self._dummies.clear()
        self.gradients.forget(self.trained)


def _gather_shards(
    local: Tensor, tensor: Tensor, group: ProcessGroup, giver: int, *, is_sharded: bool
) -> Tensor | None:
    """The whole of `tensor` on process `giver`, out of CPU copies of what each rank has of it."""
    if not is_sharded:
        return local if dist.get_rank() == giver else None
    num_ranks = dist.get_world_size(group)
    padded = local.new_zeros((-(-tensor.shape[0] // num_ranks), *tensor.shape[1:]))
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in range(num_ranks)] if dist.get_rank() == giver else None
    dist.gather(padded, parts, dst=giver, group=group)
    return None if parts is None else torch.cat(parts)[: tensor.shape[0]]


def _input_grad(leaf: Tensor | None) -> Tensor | None:
    if leaf is None:
        return None
    return torch.zeros_like(leaf, memory_format=torch.contiguous_format) if leaf.grad is None else leaf.grad


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule), f"{type(module).__name__} is not sharded"
    return module
