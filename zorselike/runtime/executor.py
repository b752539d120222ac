"""Runs one rank's actions: the same list that is checked, simulated and drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from zorselike.runtime.assembly import Assembly
from zorselike.runtime.batch import Batch
from zorselike.runtime.loss import Loss
from zorselike.runtime.ministage.ministage import Tensors
from zorselike.runtime.model.boundaries import check_crossing, name_ministage
from zorselike.runtime.model.causal_lm import telling_of_rows
from zorselike.runtime.model.signature import Signature
from zorselike.schedule.actions import COMPUTE, Action, Kind


@dataclass
class _Run:
    """State of one pass over the action list."""

    batch: Batch
    loss: Loss
    boundaries: Sequence[Signature]
    train: bool
    handed_over: dict[tuple[Kind, int, int], Tensors] = field(default_factory=dict)
    """Tensors between two ministages of this very rank."""
    produced: tuple[Tensors, int] | None = None
    """Outputs of the last computation and their first row, for the transfers that follow it."""


class Executor:
    """One rank's ministages, transport and updates, driven by an action list."""

    def __init__(self, assembly: Assembly, enter: Callable[[Action], None]) -> None:
        rank, compiled = assembly.ranks.rank, assembly.compiled
        self._plan = assembly.plan
        self._own = assembly.plan.microbatches_of_rank(rank)
        self._step_actions = compiled.step_actions[rank]
        self._evaluate_actions = compiled.evaluate_actions[rank]
        self._ministages = assembly.ministages
        self._resources = assembly.resources
        self._streams = assembly.resources.memory.streams
        self._parts = compiled.parts
        self._lowest_backward = compiled.spec.lowest_backward
        self._last = assembly.plan.num_ministages - 1
        self._transport = assembly.transport
        self._updates = assembly.updates
        self._ties = assembly.ties
        self._busy = assembly.busy
        self._positions = assembly.positions
        self.enter = enter
        """Told every action before it runs."""
        self.leave: Callable[[Action], None] = lambda _: None
        """Told every action after it ran."""

    def run(self, batch: Batch, loss: Loss, boundaries: Sequence[Signature], *, train: bool) -> None:
        """Runs a step's or an evaluation's list to its end and waits for what it sent."""
        run = _Run(batch, loss, boundaries, train)
        self._streams.begin()
        self._busy.restart()
        self._transport.begin(boundaries[0], train=train)
        for action in self._step_actions if train else self._evaluate_actions:
            with record_function(action.text):  # It costs as much as short actions: not watched.
                self.enter(action)
                self._do(action, run)
                self.leave(action)
        self._transport.finish()
        self._ties.finish()
        self._settle()

    def _settle(self) -> None:
        """At the end: the last update is over before anything follows; its copies to the host go on."""
        self._streams.compute.wait(self._streams.update.record())
        self._resources.pending_shards.settle()
        self._resources.pending_state.settle()
        self._resources.deferred_frees.settle()
        self._resources.reducing.settle()
        if self._resources.activations is not None:
            self._resources.activations.finish()

    def recover(self) -> None:
        """After an unfinished pass on a rank alone: ready for the next, as if this one had not begun but
        for the updates that took place."""
        self._settle()
        self._ties.recover()
        if self._resources.activations is not None:
            self._resources.activations.forget()
        for ministage in self._ministages.values():
            ministage.recover()
        self._settle()

    def _do(self, action: Action, run: _Run) -> None:
        if action.kind is Kind.NORM:
            self._updates.find_global_norm()
            return
        index = action.ministage
        assert index is not None
        ministage = self._ministages[index]
        match action.kind:
            case Kind.F:
                self._forward(index, action.microbatch or 0, run)
            case Kind.B:
                self._backward(index, action.microbatch or 0, run)
            case Kind.RECV_F:
                self._transport.post(action, run.boundaries[index])
            case Kind.RECV_B:
                self._transport.post(action, run.boundaries[index + 1])
            case Kind.SEND_F:
                self._send(action, run.boundaries[index + 1], run)
            case Kind.SEND_B:
                self._send(action, run.boundaries[index], run)
            case Kind.UNSHARD:
                ministage.unshard()
            case Kind.RESHARD:
                ministage.reshard()
            case Kind.REDUCE_GRAD:
                ministage.reduce()
            case Kind.TIE_GRAD:
                self._ties.exchange_grads(index)
            case Kind.TIE_VALUE:
                ministage.await_update()
                self._ties.send_values(index)
            case Kind.TIE_FETCH:
                self._ties.receive_values(index)
            case Kind.STEP:
                self._updates.step(index)
            case Kind.LOAD | Kind.OFFLOAD if action.microbatch is not None:
                activations = self._resources.activations
                assert activations is not None
                move = activations.load if action.kind is Kind.LOAD else activations.offload
                move((index, action.microbatch))
            case Kind.LOAD:
                ministage.load_shards()
            case Kind.OFFLOAD:
                ministage.offload_shards()
            case Kind.LOAD_STATE:
                ministage.state.load()
            case Kind.OFFLOAD_STATE:
                ministage.offload_state()
            case Kind.LOAD_GRAD:
                ministage.gradients.load()
            case Kind.OFFLOAD_GRAD:
                self._updates.measure(index)
                ministage.gradients.offload()
            case _:
                raise ValueError(f"this runtime has no action {action.text}")
        if action.kind in COMPUTE and self._resources.activations is not None:
            self._resources.activations.leaving.note_computed()

    def _forward(self, index: int, number: int, run: _Run) -> None:
        ministage = self._ministages[index]
        trains = run.train and index >= self._lowest_backward
        if number >= len(self._own):
            with _grad_mode(trains):
                ministage.dummy_forward(number, train=trains)
            return
        if self._resources.random is not None:
            self._resources.random.begin(self._own[number].start if run.train else None)
        kwargs = run.batch.kwargs(number, self._parts[index].accepts)
        carries_grad = [spec.requires_grad for spec in run.boundaries[index].tensors]
        with _grad_mode(trains), ministage.keeping(number, train=trains), self._telling(number, run):
            inputs = self._inputs(index, number, run)
            with self._busy.running():
                outputs = ministage.forward(number, inputs, carries_grad, kwargs, train=trains)
                if index == self._last:
                    loss = run.loss.add(outputs, run.batch.targets(number), number)
                    if trains:
                        ministage.keep_outputs(number, (loss,))
                    return
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        num_rows = self._own[number].num_rows
        boundary = run.boundaries[index + 1]
        if self._positions is not None:
            boundary = boundary.at_positions(self._positions.size)
        check_crossing(tensors, boundary, num_rows, name_ministage(self._plan, index))
        if trains:
            ministage.keep_outputs(number, tensors)
        self._pass_on(Kind.F, index + 1, number, tensors, run)

    def _telling(self, number: int, run: _Run) -> AbstractContextManager[None]:
        """For what a microbatch computes, and computes again."""
        if not self._streams.is_concurrent:  # A host that computes by itself waits for nothing when it looks.
            return nullcontext()
        return telling_of_rows(*run.batch.tell_of_rows(number))

    def _inputs(self, index: int, number: int, run: _Run) -> Tensors:
        if index == 0:
            return run.batch.inputs(number)
        if index - 1 in self._ministages:
            return run.handed_over.pop((Kind.F, index, number))
        received = self._transport.take(Kind.RECV_F, index, number)
        if self._resources.activations is not None:
            for (tensor, host), spec in zip(received, run.boundaries[index].tensors, strict=True):
                if host is not None and spec.requires_grad:  # Autograd refuses to change such in place.
                    self._resources.activations.note_host_copy(tensor, host)
        return tuple(tensor for tensor, _ in received)

    def _backward(self, index: int, number: int, run: _Run) -> None:
        ministage = self._ministages[index]
        if number >= len(self._own):
            ministage.dummy_backward(number)
            return
        # All is sent. Its graph would keep the stream of a forward for gradients that a reduction gives.
        run.produced = None
        output_grads = self._output_grads(index, number, run)
        with self._busy.running(), self._telling(number, run):
            input_grads = ministage.backward(number, output_grads)
        if index > self._lowest_backward:
            grads = tuple(grad for grad in input_grads if grad is not None)
            self._pass_on(Kind.B, index - 1, number, grads, run)

    def _output_grads(self, index: int, number: int, run: _Run) -> list[Tensor | None]:
        if index == self._last:
            return [run.loss.grad(number)]
        if index + 1 in self._ministages:
            received = run.handed_over.pop((Kind.B, index, number))
        else:
            received = tuple(tensor for tensor, _ in self._transport.take(Kind.RECV_B, index, number))
        grads = iter(received)
        return [next(grads) if spec.requires_grad else None for spec in run.boundaries[index + 1].tensors]

    def _pass_on(self, kind: Kind, neighbour: int, number: int, tensors: Tensors, run: _Run) -> None:
        """Hands over within the rank, or keeps for the sends that follow in the list."""
        if neighbour in self._ministages:
            run.handed_over[kind, neighbour, number] = tensors
            run.produced = None
        else:
            run.produced = tensors, self._own[number].start

    def _send(self, action: Action, boundary: Signature, run: _Run) -> None:
        assert run.produced is not None, f"{action.text} has nothing to send"
        tensors, first_row = run.produced
        first_position = 0 if self._positions is None else self._positions.start
        self._transport.send(action, tensors, boundary, (first_row, first_position))


def _grad_mode(train: bool) -> AbstractContextManager[Any]:
    return nullcontext() if train else torch.no_grad()
