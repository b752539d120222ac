"""One ministage on one rank: its microbatches, its updates, and where its memory is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.optim import Optimizer

from zorselike.cost.purposes import Purpose
from zorselike.cost.sizes import MinistageBytes
from zorselike.runtime.memory.streams import Event, Stream
from zorselike.runtime.ministage.gradients import Gradients
from zorselike.runtime.ministage.optimizer_state import OptimizerState, take_local
from zorselike.runtime.ministage.settings import MinistageSettings, RankResources
from zorselike.runtime.ministage.sharded_units import ShardedUnits
from zorselike.runtime.ministage.sharding import local_tensor
from zorselike.runtime.ministage.shards import Shards
from zorselike.runtime.ministage.unit import enter
from zorselike.runtime.model.nested import map_tensors
from zorselike.runtime.tensor_parallel.pieces import PartOf

Tensors = tuple[Tensor, ...]


class ShardedMinistage:
    """Layers of one ministage, their parameters sharded over the ranks of its group.

    With ZeRO 1 and 2 `unshard` and `reshard` gather and free them, with ZeRO 3 `forward` and `backward` do
    so layer by layer, with ZeRO 0 they are always whole.
    """

    shards: Shards
    """Made by `warm_up`."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        unit_names: Sequence[str],
        settings: MinistageSettings,
        resources: RankResources,
    ) -> None:
        """`unit_names`: submodules that become FSDP units; none if the whole is one."""
        group = settings.group
        self.index = index
        self.module = module
        self._group = group
        self._settings = settings
        self._resources = resources
        self._streams = resources.memory.streams
        self._gathered_by_schedule = group.zero in (1, 2)
        self._reduces_in_backward = group.zero == 3
        self._units = ShardedUnits(module, unit_names, settings, resources)
        parallel = settings.tensor_parallel
        self._positions = None if parallel is None else parallel.positions
        if self._positions is not None:
            take = self._positions.take
            self._slices_at_entry = self._units.slice_at_entry(take, hidden_enters=index > 0)
        self.sharded = {name: parameter for unit in self._units.named for name, parameter in unit}
        """Parameters as this rank holds them, by global name. (FSDP2 puts whole ones in their places in the
        module, and leaves them there after some passes.)"""
        self.state = OptimizerState(
            self._units.masters,
            self._units.host_backed_masters,
            resources,
            offload="optimizer" in group.offload,
        )
        self._inputs: dict[int, list[Tensor | None]] = {}
        """Per microbatch: leaves that collect the gradients of its inputs."""
        self._dummies: dict[int, Tensor] = {}
        self._edges: dict[int, list[GradientEdge | None]] = {}
        """Per microbatch: where its backward starts; the outputs themselves are not needed."""
        trained = [[(name, p) for name, p in unit if p.requires_grad] for unit in self._units.named]
        units = list(zip(self._units.fsdp_modules, trained, strict=True))
        self.gradients = Gradients(units, resources)
        self.trained = {
            name: self.state.masters.get(name, p)
            for unit in trained
            for name, p in unit
            if name not in settings.borrowed
        }
        """Parameters of the optimizer, by global name in model order: fp32 masters where there are any; once
        it is there (`train_by`), those that it has."""
        self._is_gathered = False
        self._has_unreduced = False
        """Whether a backward has left gradients whole."""
        self._is_inside = False
        """Whether a backward has begun and not ended."""
        self._shards_due = False
        """Whether FSDP2 itself gathers next, and the shards must be there by then."""
        self._updated: Event | None = None
        self.before_change: dict[str, Callable[[Stream], None]] = {}
        """Called before a stream changes values: each makes it wait for a copy that is being taken, of which
        there is one at a time for every purpose."""

    def train_by(self, optimizer: Optimizer) -> None:
        """The optimizer that was made with all of `trained`."""
        self.trained = take_local(optimizer, self.trained)
        self.state.attach(optimizer)

    def warm_up(self) -> None:
        """Gathers once and lets FSDP find its root, on every rank alike: afterwards a rank
        without rows can take part in collectives, communicators exist, and shards may leave."""
        with torch.no_grad(), self._units.gathering_one_at_a_time():
            self._units.anchor_forward(requires_grad=False)
        sizes = self.sizes  # While all storage is there.
        self.shards = Shards(
            self._units.named,
            self._resources,
            kept=self._settings.tied,
            offload="params" in self._group.offload and not self._settings.keeps_shards,
        )
        if self._reduces_in_backward:
            # ZeRO 3 gathers two layers of one ministage: one that computes, one ahead.
            ledger = self._resources.memory.ledger
            two_layers = min(2 * sizes.largest_unit_bytes, sizes.gathered_bytes)
            others = ledger.held(Purpose.GATHERED_PARAMETERS, "device")
            ledger.hold(Purpose.GATHERED_PARAMETERS, "device", max(0, two_layers - others))

    @cached_property
    def sizes(self) -> MinistageBytes:
        """Bytes of its parts on this rank, of its optimizer's state the masters; the same at any time."""
        return self._units.measure()

    # -- residency -------------------------------------------------------------------------

    def unshard(self) -> None:
        """Starts the all-gathers."""
        self._note_gathered(True)
        self._units.gather(self.shards.arrive_unit)

    def reshard(self) -> None:
        """Frees gathered parameters."""
        self._units.reshard()
        self._note_gathered(False)

    def _note_gathered(self, is_gathered: bool) -> None:
        ledger = self._resources.memory.ledger
        if self._is_gathered is not is_gathered:
            enter = ledger.hold if is_gathered else ledger.drop
            enter(Purpose.GATHERED_PARAMETERS, "device", self.sizes.gathered_bytes)
            self._is_gathered = is_gathered

    # -- between device and host -----------------------------------------------------------

    def load_shards(self) -> None:
        """Starts the shards' way to the device."""
        self.shards.load()
        self._shards_due = not self._gathered_by_schedule

    def offload_shards(self) -> None:
        """Frees the shards once they are read; new values go to the host first."""
        readers = self._streams.gather if self._gathered_by_schedule else self._streams.compute
        self.shards.offload(readers.record())

    def _await_shards(self) -> None:
        if self._group.zero == 0:
            self._note_gathered(True)  # As layers are called, until the reduction.
        if self._shards_due:
            for stream in self._units.reading_streams:
                self.shards.arrive(stream)
            self._shards_due = False

    # -- update ----------------------------------------------------------------------------

    def await_reduction(self) -> None:
        """Makes compute wait for the last reduction, whose gradients are then compute's."""
        compute = self._streams.compute
        if self.gradients.ready_on is not compute:
            compute.wait(self.gradients.ready_on.record())
            self.gradients.ready_on = compute

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, on the update stream, the optimizer's parameters have their gradients and state; then
        shards get the new values, and the gradients go."""
        self._resources.deferred_frees.settle()
        update = self._streams.update
        if self.state.offloads and self._updated is None:
            # The optimizer makes its state now. Memory that is given back is its stream's for ever: it is to
            # be that of the stream which brings the state back from now on.
            update = self._streams.load_state
        self._await_copy(update)
        update.wait(self.gradients.ready_on.record())
        self.state.arrive(update)
        self.gradients.arrive(update)
        if self.shards.are_away:
            self.shards.make_room(update)
        self.shards.arrive(update)
        self.gradients.assign(self.trained)
        with update.use():
            yield
            self._publish()
            self.state.find_moments()
        self._updated = update.record()
        if update is not self._streams.update:  # Whose end what follows the step waits for.
            self._streams.update.wait(self._updated)
        self.shards.note_update(self._updated)
        self.gradients.drop(self.trained, self._updated)

    def _publish(self) -> None:
        """Rounds the master weights into the shards."""
        if self.state.masters:
            for name, master in self.state.masters.items():
                local_tensor(self.sharded[name].detach()).copy_(local_tensor(master.detach()))

    def offload_state(self) -> None:
        """Starts the optimizer state's way to the host after the update."""
        assert self._updated is not None, "an update comes first"
        self.state.offload(self._updated)

    def await_update(self) -> None:
        """Makes compute wait for the update."""
        if self._updated is not None:
            self._streams.compute.wait(self._updated)

    # -- compute ---------------------------------------------------------------------------

    def keeping(self, number: int, *, train: bool) -> AbstractContextManager[None]:
        """Inside, what autograd saves of a microbatch is kept for offload, if it trains and the plan asks."""
        activations = self._resources.activations
        if activations is None or not train:
            return nullcontext()
        return activations.keeping((self.index, number))

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
        with self._resources.busy.waiting():
            self._await_shards()
        self._units.call_order.begin()
        if train:
            inputs = self._enter(number, inputs, carries_grad)
        if self._positions is not None:
            inputs = self._widen(inputs)
        outputs = self.module(*inputs, **kwargs)
        if self._positions is not None and not self._slices_at_entry:
            outputs = map_tensors(outputs, self._positions.take)
        self._units.call_order.end()
        return outputs

    def _enter(self, number: int, inputs: Tensors, carries_grad: Sequence[bool]) -> Tensors:
        """Fresh autograd leaves of what enters."""
        leaves: list[Tensor | None] = []
        entered = []
        for tensor, carries in zip(inputs, carries_grad, strict=True):
            leaf = None
            if not carries:
                tensor = tensor.detach()
            elif self._resources.activations is None:
                tensor = leaf = tensor.detach().requires_grad_()
            else:
                leaf, tensor = enter(tensor)
            leaves.append(leaf)
            entered.append(tensor)
        self._inputs[number] = leaves
        return tuple(entered)

    def _widen(self, inputs: Tensors) -> Tensors:
        """From the second ministage on what enters has this rank's positions alone."""
        assert self._positions is not None
        return tuple(map(self._positions.widen, inputs)) if self.index else inputs

    def keep_outputs(self, number: int, outputs: Tensors) -> None:
        """Keeps where `backward` of this microbatch starts: at its outputs, or at the loss."""
        edges = [get_gradient_edge(out) if out.requires_grad else None for out in outputs]
        self._units.call_order.check_reached([edge.node for edge in edges if edge is not None])
        self._edges[number] = edges

    def backward(self, number: int, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Backward of one microbatch; returns the gradients of its inputs (None: carries none)."""
        leaves, edges = self._inputs.pop(number), self._edges.pop(number)
        self._prepare_backward(reduces=self._reduces_in_backward)
        activations, key = self._resources.activations, (self.index, number)
        if activations is not None:
            with self._resources.busy.waiting():
                activations.arrive(key)
        self._has_unreduced = self._is_inside = True
        due = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge is not None]
        torch.autograd.backward([edge for edge, _ in due], [grad for _, grad in due])
        self._is_inside = False
        if self._reduces_in_backward:
            self._collect_reduced()
        if activations is not None:
            del edges, due
            activations.drop(key)
        return tuple(map(_input_grad, leaves))

    def _prepare_backward(self, *, reduces: bool) -> None:
        """Parameters are there, and, where a backward reduces, last reductions' results are used up."""
        with self._resources.busy.waiting():
            self._await_shards()
            self._units.wait_gathered()
        if reduces:
            self._resources.deferred_frees.settle()
        self._units.synchronise(reduces)

    def _backward_of_nothing(self, output: Tensor) -> None:
        """Reduces what backwards before have left, by one from an anchor pass."""
        torch.autograd.backward(output, torch.zeros_like(output))
        self._collect_reduced()

    def _collect_reduced(self) -> None:
        streams = self._streams
        self.gradients.collect(streams.reduce if self._units.reduces_beside else streams.compute)
        self._has_unreduced = False

    def note_calls(self, sources: Collection[str], changing: Collection[str]) -> None:
        """Before the first step: which units are given nothing that carries a gradient, and which change in
        place what they are given."""
        self._units.note_calls(sources, changing)

    def dummy_forward(self, number: int, *, train: bool) -> None:
        """Joins a ZeRO 3 microbatch's gathers without computing."""
        self._await_shards()
        output = self._units.anchor_forward(requires_grad=train and self._settings.receives_grad)
        if train:
            self._dummies[number] = output

    def dummy_backward(self, number: int) -> None:
        """Joins a ZeRO 3 microbatch's gathers and reductions without computing."""
        output = self._dummies.pop(number)
        self._prepare_backward(reduces=True)
        if output.requires_grad:
            self._backward_of_nothing(output)

    def reduce(self) -> None:
        """Sums the gradients over the group: one backward that touches every trainable parameter
        with a zero gradient, so that ranks with fewer or no microbatches, and parameters that a
        step did not use, take part alike.

        Beside the backward that follows, if other ranks take part: what FSDP2 reads is compute's, and kept
        until the next reduction, before which compute waits for this one."""
        gathers_itself = self._group.zero == 0 and not self._is_gathered  # On a rank without rows.
        self._prepare_backward(reduces=True)
        self._resources.reducing.settle()
        if self._units.reduces_beside:
            compute, reduce = self._streams.compute, self._streams.reduce
            whole = self._units.unreduced()
            reduce.wait(compute.record())
            with reduce.use():
                self._backward_of_nothing(self._units.anchor_forward(requires_grad=True))
            reduced = reduce.record()
            self._resources.reducing.add(compute, reduced, whole)
            if gathers_itself:
                compute.wait(reduced)  # The shards were read there, and may leave now.
        else:
            self._backward_of_nothing(self._units.anchor_forward(requires_grad=True))
        if self._group.zero == 0:
            self._note_gathered(False)

    # -- parameters ------------------------------------------------------------------------

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Everything is on the device inside, for those who look at it, or change it, between steps."""
        self._await_copy(self._streams.compute)
        self.reshard()  # Some evaluations leave parameters whole, and the next pass would not gather anew.
        shards_away, state_away = self.shards.are_away, not self.state.is_on_device
        if shards_away:
            self.shards.load()
        if state_away:
            self.state.load()
        compute = self._streams.compute
        self.shards.arrive(compute)
        self.state.arrive(compute)
        try:
            yield
        finally:
            with torch.no_grad():
                self._publish()
            done = compute.record()
            if shards_away:
                self.shards.note_update(done, frozen_too=True)
                self.shards.offload(done)
            self.state.find_moments()  # Somebody may have given the optimizer others.
            if self.state.offloads:
                self.state.offload(done)
            self._resources.pending_shards.settle()
            self._resources.pending_state.settle()

    def _await_copy(self, stream: Stream) -> None:
        for await_copy in self.before_change.values():
            await_copy(stream)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank of the group holds every gradient (ZeRO 0)."""
        return self._group.zero == 0

    def answers_for(self, name: str, *, of_whole: bool) -> bool:
        """Whether this rank's part of a gradient enters a norm; `of_whole`: whether it speaks for its group
        where every rank of it holds all."""
        part = self.part_of(name)
        return not self.is_replicated or (of_whole if part is None else part.counts)

    def part_of(self, name: str) -> PartOf | None:
        """What a parameter of this rank is a piece of; None for one that is not."""
        return self._units.parts_of.get(name)

    def whole_name(self, name: str) -> str:
        """Of the parameter that one of this rank is, or of which it is a piece."""
        part = self.part_of(name)
        return name if part is None else part.name

    def recover(self) -> None:
        """After an unfinished step on a rank alone: whole and reduced gradients go, parameters are freed,
        and what is offloaded is on the host again."""
        self._inputs.clear()
        self._edges.clear()
        self._dummies.clear()
        if self._is_inside:
            self._is_inside = False
            self._units.recover()
            self._note_gathered(False)
        if self._has_unreduced:
            if self.shards.are_away:
                self.load_shards()
            if self._gathered_by_schedule and not self._is_gathered:
                self.unshard()
            self.reduce()  # The only way to make FSDP2 give up what it has added up.
        if self._is_gathered and self._gathered_by_schedule:
            self.reshard()
        self.gradients.forget(self.trained)
        done = self._streams.compute.record()
        self.shards.recover(done)
        self.state.recover(done)


def _input_grad(leaf: Tensor | None) -> Tensor | None:
    if leaf is None:
        return None
    return torch.zeros_like(leaf, memory_format=torch.contiguous_format) if leaf.grad is None else leaf.grad
