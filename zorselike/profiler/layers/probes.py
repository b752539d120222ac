"""The model to be measured: one instance of each kind of layer, and inputs of any number of rows for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from zorselike.cost.sizes import is_layer
from zorselike.errors import ConfigError
from zorselike.plan.workload import Workload
from zorselike.profiler.workload.causal_lm import training_arguments, use_grouped_experts
from zorselike.runtime.loss import LossFn
from zorselike.runtime.model.causal_lm import keep_rotations
from zorselike.runtime.model.nested import leaves, map_leaves, map_tensors, tensors_in
from zorselike.runtime.model.signature import KwargTensor
from zorselike.runtime.model.tracing import fake_copies, make_fake_mode

ModelFactory = Callable[[], nn.Module]
"""Builds the model on the meta device, each time another one."""

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
class ProbeTensor(KwargTensor):
    """A tensor that a layer is called with."""

    carries_grad: bool = False
    """Whether its gradient is wanted."""
    num_values: int | None = None
    """Its integers are below this, as positions in a row are; None: token ids."""


@dataclass(frozen=True)
class LayerProbe:
    """A layer of a kind, with what the model calls it: the first that gradients pass, if any."""

    kind: str
    module: str
    """Its global name."""
    num_instances: int
    inputs: tuple[Any, ...]
    """Positional arguments, a `ProbeTensor` in place of each tensor."""
    kwargs: Mapping[str, Any]
    is_last: bool
    """Whether the loss follows."""

    @property
    def carries_grad(self) -> bool:
        """Whether gradients of what it is given are wanted."""
        return any(tensor.carries_grad for tensor in _probed([self.inputs, self.kwargs]))

    @property
    def is_numbered(self) -> bool:
        """Whether it is one of the layers that can be recomputed."""
        return is_layer(self.module)

    @property
    def follows_itself(self) -> bool:
        """Whether such layers follow one another with one hidden state between them, and what else they take
        carries no gradient."""
        first, others = self.inputs[:1], _probed([self.inputs[1:], self.kwargs])
        passes_on = isinstance(first[0], ProbeTensor) and first[0].carries_grad if first else False
        return self.is_numbered and passes_on and not any(tensor.carries_grad for tensor in others)


def find_probes(build: ModelFactory, workload: Workload) -> tuple[LayerProbe, ...]:
    """A probe for each kind of the workload, in model order, from two runs of the model on fake tensors.

    The model's forward takes token ids `[rows, workload.sequence_length]`.
    """
    dtype: torch.dtype = getattr(torch, workload.dtype)
    modules = [module for module, _ in workload.layers]
    few, more = (
        _record_calls(build(), modules, rows, workload.sequence_length, dtype) for rows in _TRACED_ROWS
    )
    probes: dict[str, LayerProbe] = {}
    for module, kind in workload.layers:
        if kind in probes and probes[kind].carries_grad:
            continue
        inputs, kwargs = _describe(few[module], more[module], workload.sequence_length)
        probe = LayerProbe(
            kind=kind,
            module=module,
            num_instances=sum(other == kind for _, other in workload.layers),
            inputs=inputs,
            kwargs=kwargs,
            is_last=module == modules[-1],
        )
        if kind not in probes or probe.carries_grad:
            probes[kind] = probe
    return tuple(probes.values())


def build_layer(build: ModelFactory, module: str, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of one layer of the model, its weights random, on the device."""
    layer = copy.deepcopy(build().get_submodule(module)).to(dtype=dtype)
    materialise(layer, device)
    return layer.train()


def materialise(module: nn.Module, device: torch.device) -> None:
    """Gives everything of a module that is on meta memory and values on the device, in place.

    Made for timing: no rule of initialisation is followed, but numbers are drawn on the device, which for
    large models is minutes faster. Tensors used twice stay one, also if the other use is in another module.
    """
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_meta:
                values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                fill(values)
                if isinstance(tensor, nn.Parameter):
                    values = nn.Parameter(values, requires_grad=tensor.requires_grad)
                swap_tensors(tensor, values)  # type: ignore[no-untyped-call]


def fill(tensor: Tensor) -> None:
    """Gives a layer's tensor values: matrices random numbers, vectors ones, integers zeros."""
    if not tensor.is_floating_point():
        tensor.zero_()
    elif tensor.dim() > 1:
        tensor.normal_(std=_WIDTH)
    else:
        tensor.fill_(1)


_Call = tuple[tuple[Any, ...], dict[str, Any]]
_RecordedCall = tuple[_Call, frozenset[int]]
"""Arguments, and which of their tensors, counted in order, are token ids."""


def make_inputs(probe: LayerProbe, rows: int, *, num_tokens: int, device: torch.device) -> _Call:
    """Random arguments for a number of rows: token ids below `num_tokens`, positions, hidden states that
    carry gradients."""

    def make(value: Any) -> Any:
        if not isinstance(value, ProbeTensor):
            return value
        shape = value.shape_at(rows)
        if value.dtype.is_floating_point:
            return torch.randn(shape, dtype=value.dtype, device=device, requires_grad=value.carries_grad)
        if value.dtype is torch.bool:
            return torch.ones(shape, dtype=value.dtype, device=device)
        most = num_tokens if value.num_values is None else value.num_values
        return torch.randint(most, shape, dtype=value.dtype, device=device)

    return map_leaves(probe.inputs, make), map_leaves(dict(probe.kwargs), make)


def _record_calls(
    model: nn.Module, modules: Sequence[str], rows: int, tokens_per_row: int, dtype: torch.dtype
) -> dict[str, _RecordedCall]:
    """What each module is called with when the model computes `rows` rows."""
    calls: dict[str, _RecordedCall] = {}
    mode, arguments = make_fake_mode(), training_arguments(model)
    cache = arguments.get("past_key_values")
    (model,) = fake_copies([model], mode, param_dtype=dtype)
    use_grouped_experts(model)
    keep_rotations(model)
    on_cpu = torch.device("cpu")  # Whatever the caller's default is, such as meta.
    with mode:
        tokens = torch.zeros(rows, tokens_per_row, dtype=torch.int64, device=on_cpu)
    ids = tokens.untyped_storage()  # Alive, so that views of it have the same.
    for name in modules:

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            tensors = enumerate(tensors_in([args, kwargs]))
            own = frozenset(i for i, tensor in tensors if tensor.untyped_storage() is ids)
            call = map_leaves((args, kwargs), lambda leaf: None if leaf is cache else leaf)
            calls.setdefault(name, (call, own))

        model.get_submodule(name).register_forward_pre_hook(record, with_kwargs=True)
    with on_cpu, mode, torch.enable_grad():
        model(tokens, **arguments)
    if missing := [name for name in modules if name not in calls]:
        raise ConfigError(
            f"model: its forward does not call {', '.join(missing)}, so that cannot be measured"
        )
    return calls


def _describe(few: _RecordedCall, more: _RecordedCall, tokens_per_row: int) -> _Call:
    """Arguments with their tensors described; those as long as there are rows have rows."""
    call, token_ids = few
    larger = enumerate(tensors_in(more[0]))

    def describe(tensor: Tensor) -> ProbeTensor:
        number, other = next(larger)
        has_rows = (tensor.shape[:1], other.shape[:1]) == tuple((rows,) for rows in _TRACED_ROWS)
        return ProbeTensor(
            tuple(tensor.shape[1:] if has_rows else tensor.shape),
            tensor.dtype,
            has_rows=has_rows,
            carries_grad=tensor.requires_grad,
            num_values=None if number in token_ids or tensor.is_floating_point() else tokens_per_row,
        )

    described: _Call = map_tensors(call, describe)
    return described


def _probed(value: Any) -> list[ProbeTensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, ProbeTensor)]
