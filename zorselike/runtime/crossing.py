"""What crosses the boundaries of ministages, by the shape of a step's inputs; every rank finds it alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zorselike.errors import ConfigError
from zorselike.runtime.assembly import Assembly, CompiledPlan
from zorselike.runtime.host_checks import check_host_room, reserve_activations, reserve_state
from zorselike.runtime.model.boundaries import StepInputs, Trace, Traces, trace_step
from zorselike.runtime.model.signature import Signature, describe_kwargs
from zorselike.runtime.state.together import gather_by_rank
from zorselike.runtime.tensor_parallel.position_check import refuse_mixed_positions


def refuse_fixed_shapes(compiled: CompiledPlan) -> None:
    """Raises `ConfigError` for a model whose ministages are made for one shape of inputs."""
    skeleton = compiled.parts[0].skeleton
    if not skeleton.takes_any_shape:
        raise ConfigError(
            "dynamic_shapes=True needs ministages that take any shape, and those that torch.export makes "
            f"take that of the first step; pad to one shape, or pass split=. {skeleton.note}"
        )


def trace_plan(compiled: CompiledPlan, step: StepInputs) -> Trace:
    """`trace_step`, or what it gave before. Not where it makes the graphs that run. Refuses with
    replicas what `refuse_mixed_positions` does."""
    traces = compiled.traces if compiled.parts[0].skeleton.takes_any_shape else Traces()
    trace = traces.find(step)
    if trace is None:
        trace = trace_step(compiled.parts, compiled.plan, step, trainable=compiled.spec.trains)
        traces.keep(trace, step)
    if compiled.plan.has_replicas and not traces.mixes_no_positions:
        refuse_mixed_positions(compiled.parts, compiled.cut.blocks, step)
        traces.mixes_no_positions = True
    return trace


def refuse_other_length(boundaries: Sequence[Signature], length: int) -> None:
    """Raises `ConfigError` unless dimension 1 of all that crosses are the positions of the plan's sequences,
    of which each rank of a tensor-parallel replica has some."""
    for index, boundary in enumerate(boundaries):
        least = 2 if index else 1
        for spec in boundary.tensors:
            if len(spec.shape_per_row) < least or spec.shape_per_row[0] != length:
                what = f"ministage {index - 1} returns" if index else "inputs are"
                raise ConfigError(
                    f"{what} {spec}, and the plan's sequence_length is {length}: with tensor-parallel "
                    "replicas dimension 1 must be that many positions everywhere; set sequence_length, or pad"
                )


class Crossing:
    """The traces of one pipeline."""

    def __init__(self, assembly: Assembly, *, param_dtype: torch.dtype | None, dynamic: bool) -> None:
        """`dynamic`: inputs may have other shapes in every step."""
        self._assembly, self._param_dtype, self._dynamic = assembly, param_dtype, dynamic
        self._traces: dict[Signature, Trace] = {}
        self.last: Trace | None = None
        """Of the last step; None before the first."""

    def find(self, feeds: tuple[Tensor, ...] | None, kwargs: Mapping[str, Any]) -> Trace:
        """What crosses in a step with these inputs, of whichever rank has some. Collective at the first call,
        and with dynamic shapes at each.

        Raises `ConfigError` for inputs of another shape than this step's, and for what `trace_boundaries`
        refuses.
        """
        if self.last is None:
            self._refuse_missing(kwargs)
        inputs = self.last.boundaries[0] if self.last is not None and not self._dynamic else self._tell(feeds)
        trace = self._traces.get(inputs)
        if trace is None:
            trace = self._trace(inputs, kwargs)
            self._traces[inputs] = trace  # Last: a refusal is met again by who catches it and goes on.
        self.last = trace
        if feeds is not None and Signature.of(feeds) != inputs:
            mend = "pad all rows of a step to one shape"
            if not self._dynamic:
                takes_any = self._assembly.compiled.parts[0].skeleton.takes_any_shape
                further = "dynamic_shapes=True" if takes_any else "split= and dynamic_shapes=True"
                mend = f"pad to one shape, or pass {further}"
            what = "other rows of this step are" if self._dynamic else "this pipeline was built for"
            raise ConfigError(f"inputs are {Signature.of(feeds)}, but {what} {inputs}; {mend}")
        return trace

    def _refuse_missing(self, kwargs: Mapping[str, Any]) -> None:
        """Raises `ConfigError` on every rank where one that computes rows lacks a keyword argument that
        others were given, and that its ministages take: it would compute its rows without."""
        assembly = self._assembly
        given = {name for name, value in kwargs.items() if value is not None}
        takes: set[str] = set()
        if assembly.plan.microbatches_of_rank(assembly.ranks.rank):
            takes = {name for i in assembly.ministages for name in assembly.compiled.parts[i].accepts}
        told = gather_by_rank(assembly.state, (given, takes))
        givers: dict[str, int] = {}
        for rank, (names, _) in enumerate(told):
            givers |= dict.fromkeys(names - givers.keys(), rank)
        for rank, (names, taken) in enumerate(told):
            if missing := sorted((givers.keys() & taken) - names):
                raise ConfigError(
                    f"rank {rank} was given no {missing[0]}=, and rank {givers[missing[0]]} was: pass it on "
                    "every rank, of the rows pipe.rows, or as Broadcast(value)"
                )

    def _tell(self, feeds: tuple[Tensor, ...] | None) -> Signature:
        """The shape of the inputs, which the rank of the first microbatch knows."""
        assembly = self._assembly
        source = assembly.plan.group_of(0).microbatches[0].rank
        told = [Signature.of(feeds) if assembly.ranks.rank == source and feeds else Signature(())]
        process = assembly.ranks.process_of[source]
        dist.broadcast_object_list(told, process, group=assembly.control, device=torch.device("cpu"))
        return told[0]

    def _trace(self, inputs: Signature, kwargs: Mapping[str, Any]) -> Trace:
        assembly = self._assembly
        step = assembly.step_inputs = StepInputs(inputs, describe_kwargs(kwargs), self._param_dtype)
        trace = trace_plan(assembly.compiled, step)
        if assembly.plan.has_replicas:
            refuse_other_length(trace.boundaries, assembly.plan.sequence_length or 0)
        if not self._traces:
            assembly.take_calls(trace)
            if any(group.offload for group in assembly.plan.groups):
                reserve_activations(assembly, trace)
                check_host_room(assembly)
                reserve_state(assembly)
        return trace
