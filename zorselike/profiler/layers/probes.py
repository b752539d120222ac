"""The model to be measured: one instance of each kind of layer, and inputs of any number of rows for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zorselike.cost.sizes import is_layer
from zorselike.errors import ConfigError
from zorselike.plan.workload import Workload
from zorselike.runtime.loss import LossFn
from zorselike.runtime.model.nested import leaves, map_leaves, map_tensors, tensors_in
from zorselike.runtime.model.signature import KwargTensor

ModelFactory = Callable[[], nn.Module]
"""Builds the model on the meta device."""

_WIDTH = 0.02
"""Of the normal distribution of random weights: any that overflows nothing will do."""

_TRACED_ROWS = (2, 3)


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """The model as it is to be trained, and how often and how large it is tried."""

    workload: Workload
    build: ModelFactory
    loss_fn: LossFn
    """Follows the model's last layer."""
    num_tokens: int
    """Token ids are below it."""
    most_rows: int
    """The largest microbatch that is tried."""
    repeats: int

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.workload.dtype)
        return found


@dataclass(frozen=True)
class LayerProbe:
    """The first layer of a kind, with what the model calls it."""

    kind: str
    module: str
    """Its global name."""
    num_instances: int
    inputs: tuple[Any, ...]
    """Positional arguments, a `KwargTensor` in place of each tensor."""
    kwargs: Mapping[str, Any]
    carries_grad: bool
    """Whether gradients of its inputs are wanted."""
    is_last: bool
    """Whether the loss follows."""

    @property
    def is_numbered(self) -> bool:
        """Whether it is one of the layers that can be recomputed."""
        return is_layer(self.module)

    @property
    def follows_itself(self) -> bool:
        """Whether such layers follow one another with one hidden state between them, and take no other
        tensor."""
        return self.is_numbered and self.carries_grad and len(_tensors([self.inputs, self.kwargs])) == 1


def find_probes(build: ModelFactory, workload: Workload) -> tuple[LayerProbe, ...]:
    """A probe for each kind of the workload, in model order, from two runs of the model on meta.

    The model's forward takes token ids `[rows, workload.sequence_length]`.
    """
    dtype: torch.dtype = getattr(torch, workload.dtype)
    first: dict[str, str] = {}
    for module, kind in workload.layers:
        first.setdefault(kind, module)
    few, more = (
        _record_calls(build().to(dtype=dtype), list(first.values()), rows, workload.sequence_length)
        for rows in _TRACED_ROWS
    )
    last_module, _ = workload.layers[-1]
    probes = []
    for kind, module in first.items():
        inputs, kwargs = _describe(few[module], more[module])
        probes.append(
            LayerProbe(
                kind=kind,
                module=module,
                num_instances=sum(other == kind for _, other in workload.layers),
                inputs=inputs,
                kwargs=kwargs,
                carries_grad=any(tensor.dtype.is_floating_point for tensor in _tensors(inputs)),
                is_last=module == last_module,
            )
        )
    return tuple(probes)


def build_layer(build: ModelFactory, module: str, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of one layer of the model, its weights random, on the device."""
    layer = copy.deepcopy(build().get_submodule(module)).to(dtype=dtype)
    materialise(layer, device)
    return layer.train()


def materialise(module: nn.Module, device: torch.device) -> None:
    """Gives everything of a module that is on meta memory and values on the device, in place: matrices
    random numbers, vectors ones. Made for timing: no rule of initialisation is followed, but numbers are
    drawn on the device, which for large models is minutes faster. Tensors used twice stay one."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def make(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if not tensor.is_floating_point():
                values.zero_()
            elif tensor.dim() > 1:
                values.normal_(std=_WIDTH)
            else:
                values.fill_(1)
            if isinstance(tensor, nn.Parameter):
                values = nn.Parameter(values, requires_grad=tensor.requires_grad)
            made[id(tensor)] = (tensor, values)  # The first keeps its id from being used again.
        return made[id(tensor)][1]

    with torch.no_grad():
        for owner in module.modules():
            for key, parameter in owner.named_parameters(recurse=False):
                if parameter.is_meta:
                    owner.register_parameter(key, make(parameter))  # type: ignore[arg-type]
            for key, buffer in owner.named_buffers(recurse=False):
                if buffer.is_meta:
                    owner._buffers[key] = make(buffer)


_Call = tuple[tuple[Any, ...], dict[str, Any]]


def make_inputs(probe: LayerProbe, rows: int, *, num_tokens: int, device: torch.device) -> _Call:
    """Random arguments for a number of rows: token ids below `num_tokens`, hidden states that carry
    gradients."""

    def make(value: Any) -> Any:
        if not isinstance(value, KwargTensor):
            return value
        shape = value.shape_at(rows)
        if value.dtype.is_floating_point:
            return torch.randn(shape, dtype=value.dtype, device=device, requires_grad=probe.carries_grad)
        if value.dtype is torch.bool:
            return torch.ones(shape, dtype=value.dtype, device=device)
        return torch.randint(num_tokens, shape, dtype=value.dtype, device=device)

    return map_leaves(probe.inputs, make), map_leaves(dict(probe.kwargs), make)


def _record_calls(
    model: nn.Module, modules: Sequence[str], rows: int, tokens_per_row: int
) -> dict[str, _Call]:
    """What each module is called with when the model computes `rows` rows on meta."""
    calls: dict[str, _Call] = {}
    for name in modules:

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            calls.setdefault(name, (args, kwargs))

        model.get_submodule(name).register_forward_pre_hook(record, with_kwargs=True)
    model(torch.zeros(rows, tokens_per_row, dtype=torch.int64, device="meta"))
    if missing := [name for name in modules if name not in calls]:
        raise ConfigError(
            f"model: its forward does not call {', '.join(missing)}, so that cannot be measured"
        )
    return calls


def _describe(few: _Call, more: _Call) -> _Call:
    """Arguments with their tensors described; those as long as there are rows have rows."""
    larger = iter(tensors_in(more))

    def describe(tensor: Tensor) -> KwargTensor:
        has_rows = (tensor.shape[:1], next(larger).shape[:1]) == tuple((rows,) for rows in _TRACED_ROWS)
        shape = tensor.shape[1:] if has_rows else tensor.shape
        return KwargTensor(tuple(shape), tensor.dtype, has_rows=has_rows)

    described: _Call = map_tensors(few, describe)
    return described


def _tensors(value: Any) -> list[Any]:
    """Tensors, or what describes them, within nested values."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor | KwargTensor)]
