"""The modules of one ministage that FSDP2 gathers and reduces, on one rank.

The one class that calls FSDP2, by its public API alone; beside it `gradients.py` takes the unrounded sums
of its reductions. What each call yields, and the traps, were measured (tests count the collectives).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from zorselike.cost.parameter_bytes import FP32_BYTES, ParameterBytes
from zorselike.cost.sizes import MinistageBytes, is_layer
from zorselike.runtime._compat import (
    gather_stream,
    reduces_unused_parameters,
    reset_after_failure,
    share_streams,
    unreduced_gradients,
)
from zorselike.runtime.memory.host_backed import HostBackedTensors
from zorselike.runtime.memory.streams import Event, Stream
from zorselike.runtime.ministage.gradients import HALF
from zorselike.runtime.ministage.optimizer_state import place_masters, take_masters
from zorselike.runtime.ministage.settings import MinistageSettings, RankResources
from zorselike.runtime.ministage.sharding import like_sharded, local_tensor
from zorselike.runtime.ministage.shards import NamedParameters
from zorselike.runtime.ministage.unit import EVERY_HOOK, CallOrder, Unit, as_fsdp
from zorselike.runtime.model.pruning import find_units
from zorselike.runtime.tensor_parallel.pieces import Piece, cut_layer
from zorselike.schedule.contract import reduces_beside


class ShardedUnits:
    """The units of one ministage, sharded over the mesh of its group."""

    def __init__(
        self,
        module: nn.Module,
        unit_names: Sequence[str],
        settings: MinistageSettings,
        resources: RankResources,
    ) -> None:
        group = settings.group
        self._module = module
        self._group = group
        self._settings = settings
        self._memory = resources.memory
        self._streams = resources.memory.streams
        self._reduces_in_backward = group.zero == 3
        self.reduces_beside = reduces_beside(
            group.zero,
            len(group.flat_ranks),
            overlap=group.overlap_grad_reduce,
            on_gpu=self._streams.is_concurrent,
        )
        self._waits_at_once = self._streams.is_concurrent or len(group.flat_ranks) == 1
        recompute = group.recompute == "layer"
        unit_modules = [module.get_submodule(name) for name in unit_names]
        users = {key for own in (module, *unit_modules) for key in _hooks_of(own)}
        self._units = [
            Unit(
                name,
                unit,
                (),
                recompute=recompute and is_layer(name),
                compiles=settings.compiles and is_layer(name),
                activations=resources.activations,
                random=resources.random,
            )
            for name, unit in zip(unit_names, unit_modules, strict=True)
        ]
        self._root = Unit(
            "",
            module,
            unit_modules,
            recompute=recompute and not unit_names,
            activations=resources.activations,
            random=resources.random,
            random_name=next(iter(settings.modules), ""),
        )
        self._root.chain(self._units)
        self._prefixes = {id(m): prefix for prefix, m in reversed(list(module.named_modules()))}
        self._pieces: dict[str, list[tuple[Unit, Piece]]] = {}
        """Of each layer that tensor parallelism cuts."""
        self.masters: dict[str, nn.Parameter] = {}
        """fp32 master weights of what trains in half precision, by global name."""
        self.host_backed_masters: list[HostBackedTensors] = []
        """Host copies of the masters, one a unit, if the plan offloads optimizer state."""
        self._shard()
        pieces = [entry for entries in self._pieces.values() for entry in entries]
        self._piece_units = [unit for unit, _ in pieces]
        self._alone = {unit for unit, piece in pieces if piece.held.mesh.size() == 1}
        """Pieces that no other rank holds: FSDP2 reads their shards where it waits."""
        self.parts_of = {name: part for _, piece in pieces for name, part in piece.parts.items()}
        """Parameters that are pieces of others, by global name."""
        resources.fsdp_roots.append(self._fsdp_root)
        share_streams(resources.fsdp_roots)
        self._set_prefetch()
        # With ZeRO 3 every rank gathers as its layers are called.
        gathers_as_called = self._reduces_in_backward and len(group.flat_ranks) > 1
        self.call_order = CallOrder(
            self._units if gathers_as_called else (), meets_dummies=group.has_uneven_counts
        )
        if self._streams.is_concurrent:
            for unit in self._owners:
                unit.module.register_forward_pre_hook(partial(self._await_gather, unit), prepend=True)
        for unit in self._owners:
            resources.busy.leave_out_gathers(unit.module)
        self._own_hooks = {key for unit in self._every_unit for key in _hooks_of(unit.module)} - users
        """FSDP2's and those made here, by the keys under which modules have them."""
        self._handles: list[Any] = []
        self._gathered: dict[str, Event] = {}
        """Per unit: the end of its gather, until compute waits for it."""
        self._sync_state: bool | None = None

    # -- construction ----------------------------------------------------------------------

    def _shard(self) -> None:
        """Materialises one unit at a time and shards it before the next, so that a rank never
        holds more than one whole unit of a model that began on meta."""
        settings, param_dtype = self._settings, self._settings.param_dtype
        computes_in = {param_dtype or p.dtype for p in self._module.parameters() if p.requires_grad}
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype,
            # Without an explicit fp32, torch before 2.15 accumulates microbatches in bf16.
            reduce_dtype=torch.float32 if computes_in & {*HALF} else None,
        )
        shard = partial(fully_shard, mp_policy=policy, reshard_after_forward=self._reduces_in_backward)
        names = {unit.name for unit in self._units}
        for name in find_units(self._module, settings.modules) if names else ():
            if name not in names:  # It shares weights, so it is sharded with the root.
                settings.materialise(self._module.get_submodule(name), name)
        units = [*self._units, self._root]
        for unit in units:
            settings.materialise(unit.module, unit.name)
            for part, mesh in [*self._cut(unit), (unit, settings.mesh)]:
                named = self._named_parameters_of(part)
                local = take_masters(named, mesh, param_dtype, settings.borrowed)
                if part.owns_parameters or part is self._root:
                    shard(part.module, mesh=mesh)
                sharded = dict(self._named_parameters_of(part))
                for name, rows in local.items():
                    self.masters[name] = nn.Parameter(like_sharded(rows, sharded[name]))
                for name, whole in named:
                    # What a model notes on a parameter, `_no_weight_decay`, is for who makes the optimizer.
                    for own in (sharded[name], self.masters.get(name, sharded[name])):
                        vars(own).update(vars(whole))
                offloads = "optimizer" in self._group.offload
                self.host_backed_masters += place_masters(local, self._memory, offload=offloads)
        parts = [part for unit in units for part in (unit, *(piece for piece, _ in self._pieces_of(unit)))]
        self._owners = owners = [unit for unit in parts if unit.owns_parameters]
        self.fsdp_modules: list[FSDPModule] = [as_fsdp(unit.module) for unit in owners]
        """The units that own parameters, as FSDP2 has them; in the order of `named`."""
        for fsdp in {id(m): m for m in [*self.fsdp_modules, as_fsdp(self._module)]}.values():
            # Rows, not ranks, weigh a gradient: the loss is a sum over the global batch.
            fsdp.set_gradient_divide_factor(1.0)
            fsdp.set_force_sum_reduction_for_comms(True)
        self._fsdp_root = as_fsdp(self._module)
        if self._reduces_in_backward:
            for unit in owners:
                if unit.trains and not reduces_unused_parameters(as_fsdp(unit.module)):
                    unit.anchors_real_forwards = True

    def _cut(self, unit: Unit) -> list[tuple[Unit, DeviceMesh]]:
        """Takes out what tensor parallelism cuts of a layer: its pieces on this rank."""
        parallel = self._settings.tensor_parallel
        if parallel is None or unit.name not in parallel.blocks:
            return []
        pieces = cut_layer(unit.module, unit.name, parallel)
        unit.find_slots()
        units = [
            Unit(f"{unit.name}.piece{piece.held.number}", piece, (), recompute=False) for piece in pieces
        ]
        unit.enclose(units)
        self._pieces[unit.name] = list(zip(units, pieces, strict=True))
        return [(part, piece.held.mesh) for part, piece in self._pieces[unit.name]]

    def _pieces_of(self, unit: Unit) -> list[tuple[Unit, Piece]]:
        return self._pieces.get(unit.name, [])

    def slice_at_entry(self, take: Callable[[Tensor], Tensor], *, hidden_enters: bool) -> bool:
        """Makes the first layer, or what comes after all layers, take this rank's positions of the sequence;
        False where there is only what comes before layers."""
        takers = [unit for unit in self._units if hidden_enters or is_layer(unit.name)]
        for unit in takers[:1]:
            unit.takes = take
        return bool(takers)

    def _named_parameters_of(self, unit: Unit) -> list[tuple[str, nn.Parameter]]:
        """The unit's own parameters as they are registered now, each once, by global name."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for owner, key, parameter in unit.slots():
            if isinstance(owner, Piece):
                found[id(parameter)] = (owner.names[key], parameter)
                continue
            prefix = self._prefixes[id(owner)]
            found.setdefault(id(parameter), (f"{prefix}.{key}" if prefix else key, parameter))
        return list(found.values())

    @property
    def named(self) -> list[NamedParameters]:
        """The sharded parameters of each unit that owns some."""
        return [self._named_parameters_of(unit) for unit in self._owners]

    def measure(self) -> MinistageBytes:
        """Bytes on this rank, while all storage is there; of the optimizer's state the masters alone."""
        units = self.named
        stored = {name: local_tensor(p.detach()) for unit in units for name, p in unit}
        kept = [tensor for name, tensor in stored.items() if name in self._settings.tied]
        whole = [sum(p.numel() * p.itemsize for _, p in unit) for unit in units]
        one_gradient = {
            name: ParameterBytes(p.itemsize).gradient for unit in units for name, p in unit if p.requires_grad
        }
        gradients = [sum(p.numel() * one_gradient.get(name, 0) for name, p in unit) for unit in units]
        return MinistageBytes(
            gathered_bytes=sum(whole),
            shard_bytes=sum(tensor.untyped_storage().nbytes() for tensor in stored.values()),
            kept_shard_bytes=sum(tensor.untyped_storage().nbytes() for tensor in kept),
            gradient_bytes=sum(gradients),
            gradient_shard_bytes=sum(stored[name].numel() * size for name, size in one_gradient.items()),
            state_bytes=sum(FP32_BYTES * stored[name].numel() for name in self.masters),
            largest_unit_bytes=max(whole, default=0),
            largest_unit_gradient_bytes=max(gradients, default=0),
        )

    def _set_prefetch(self) -> None:
        """Gathers happen where the schedule says: FSDP's guess at the order is wrong as soon as
        several forwards precede a backward, or an evaluation came between. A list of the unit
        itself turns it off; with ZeRO 3 it names the unit that the backward visits next."""
        self._fsdp_root.set_modules_to_backward_prefetch([self._fsdp_root])
        takes_part = self._settings.receives_grad
        previous: FSDPModule | None = None
        for unit in self._piece_units:
            as_fsdp(unit.module).set_modules_to_backward_prefetch([as_fsdp(unit.module)])
        for unit in self._units:
            if not unit.owns_parameters:
                continue
            current = as_fsdp(unit.module)
            ahead = current
            if self._reduces_in_backward and previous is not None and takes_part:
                ahead = previous
            current.set_modules_to_backward_prefetch([ahead])
            takes_part = takes_part or unit.trains
            previous = current

    # -- gathering -------------------------------------------------------------------------

    @property
    def reading_streams(self) -> tuple[Stream, ...]:
        """On which FSDP2 reads shards where it gathers by itself: compute where a rank has all of them, else
        one of its own."""
        has_all = not self._reduces_in_backward or len(self._group.flat_ranks) == 1
        own = self._streams.compute if has_all else self._streams.of(gather_stream(self._fsdp_root))
        return (own, self._streams.compute) if self._alone else (own,)

    def gather(self, shards_arrive: Callable[[int, Stream], None]) -> None:
        """Starts the all-gathers, one a unit, in the order in which layers compute; `shards_arrive` makes a
        stream wait for one unit's shards.

        Each unit is gathered and copied out on one stream, and what `reshard` frees returns there.
        FSDP2 orders only gathers that it starts itself; so these begin after all that compute has
        been given, and compute waits for each."""
        gather = self._streams.gather
        gather.wait(self._streams.compute.record())
        self._handles = []
        for position, (unit, fsdp) in enumerate(zip(self._owners, self.fsdp_modules, strict=True)):
            shards_arrive(position, gather)
            with gather.use():
                handle = fsdp.unshard(async_op=True)
                if handle is not None and (self._waits_at_once or unit in self._alone):
                    handle.wait()
                elif handle is not None:
                    self._handles.append(handle)
            if self._streams.is_concurrent:
                self._gathered[unit.name] = gather.record()

    def wait_gathered(self) -> None:
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

    def reshard(self) -> None:
        """Frees gathered parameters; a gather that nobody used is waited for first, since FSDP2 would
        otherwise skip the next one."""
        self.wait_gathered()
        for fsdp in self.fsdp_modules:
            fsdp.reshard()

    def recover(self) -> None:
        """After an exception inside a forward or backward; raises `RuntimeError` where torch cannot."""
        self._sync_state = None
        if not reset_after_failure(self._fsdp_root):
            raise RuntimeError("this torch cannot leave an unfinished backward behind; 2.13 can")

    @contextmanager
    def gathering_one_at_a_time(self) -> Iterator[None]:
        """Inside, a forward gathers and frees unit by unit, as with ZeRO 3; after it nothing is gathered."""
        self._fsdp_root.set_reshard_after_forward(True)
        yield
        self.reshard()
        self._fsdp_root.set_reshard_after_forward(self._reduces_in_backward)

    # -- reducing --------------------------------------------------------------------------

    def anchor_forward(self, *, requires_grad: bool) -> Tensor:
        """A forward that runs no user code: its backward gives every trainable parameter a zero gradient."""
        self.call_order.begin()
        x = torch.zeros(1, device=self._memory.device, requires_grad=requires_grad)
        for unit in self._every_unit:
            unit.is_anchor_pass = True
        try:
            with self._without_users_hooks():
                output: Tensor = self._module(x)
        finally:
            for unit in self._every_unit:
                unit.is_anchor_pass = False
        return output

    @property
    def _every_unit(self) -> list[Unit]:
        return [*self._units, *self._piece_units, self._root]

    @contextmanager
    def _without_users_hooks(self) -> Iterator[None]:
        """Inside, modules have no hooks of the user's, which would be shown a single number."""
        found = [(u.module, kind, getattr(u.module, kind)) for u in self._every_unit for kind in EVERY_HOOK]
        others = [entry for entry in found if not entry[2].keys() <= self._own_hooks]
        for module, kind, hooks in others:
            own = [(key, hook) for key, hook in hooks.items() if key in self._own_hooks]
            setattr(module, kind, OrderedDict(own))
        try:
            yield
        finally:
            for module, kind, hooks in others:
                setattr(module, kind, hooks)

    def note_calls(self, sources: Collection[str], changing: Collection[str]) -> None:
        """`sources`: units that get nothing that carries a gradient: where a rank has no microbatch it must
        reduce in the order of the others' backwards. `changing`: those that change in place what they are
        given, of which they cannot compute again."""
        for unit in (*self._units, self._root):
            unit.recomputes &= unit.name not in changing
        for unit in self._units:
            for part in (unit, *(piece for piece, _ in self._pieces_of(unit))):
                part.is_source = self._reduces_in_backward and unit.name in sources

    def unreduced(self) -> list[Tensor]:
        """The whole gradients that the next reduction reads."""
        return [gradient for fsdp in self.fsdp_modules for gradient in unreduced_gradients(fsdp)]

    def synchronise(self, reduce_now: bool) -> None:
        """Whether the next backward reduces, frees the parameters and ends FSDP's iteration."""
        if self._sync_state is reduce_now:
            return
        self._sync_state = reduce_now
        keeps_gathered = self._group.grad_reduce == "microbatch" and self._group.zero in (1, 2)
        self._fsdp_root.set_requires_gradient_sync(reduce_now)
        self._fsdp_root.set_reshard_after_backward(reduce_now and not keeps_gathered)
        self._fsdp_root.set_is_last_backward(reduce_now)


def _hooks_of(module: nn.Module) -> Iterator[int]:
    """The keys of all that is called when a module is."""
    for kind in EVERY_HOOK:
        yield from getattr(module, kind)
