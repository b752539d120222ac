"""The workload of any model: it runs once on fake tensors, without memory, and is watched.

Counted are matrix products (`torch.utils.flop_counter`; what is elementwise counts nothing) and the
bytes that autograd saves, as torch's own kernels do; what a GPU's fused kernels of others spare is not
known here.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zorselike.errors import ConfigError
from zorselike.plan.workload import ITEMSIZES, LayerKind, Workload
from zorselike.profiler.workload.causal_lm import (
    causal_lm_loss,
    name_adapters,
    training_arguments,
    use_grouped_experts,
)
from zorselike.profiler.workload.layer_watch import LayerRecord, LayerWatch, watch_layers
from zorselike.profiler.workload.model_layers import (
    Structure,
    describe_structure,
    find_layers,
    plan_of_layers,
    require_layers,
)
from zorselike.profiler.workload.pieces import count_pieces
from zorselike.runtime._compat import ASKS_FOR_VALUES
from zorselike.runtime.model.causal_lm import keep_rotations
from zorselike.runtime.model.nested import map_leaves
from zorselike.runtime.model.partition import find_ties
from zorselike.runtime.model.pruning import loose_parameters, plan_module
from zorselike.runtime.model.tracing import Guesses, fake_copies, make_fake_mode
from zorselike.text.wording import first_line


@dataclass(frozen=True)
class _Layer:
    """One layer of the model and what is known of it."""

    name: str
    module: nn.Module
    num_parameters: int
    """Borrowed ones left out; those that lie around the layers are with the first layer below."""
    num_trainable: int
    num_borrowed: int
    num_borrowed_trainable: int
    record: LayerRecord

    @property
    def structure(self) -> Structure:
        """Equal for layers of one kind."""
        counts = self.num_parameters, self.num_borrowed, self.num_borrowed_trainable
        return (describe_structure(self.module), *counts, self.record.has_backward)


def measure_workload(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Tensor],
    *,
    dtype: str,
    sequence_length: int | None = None,
    name: str = "",
    kwargs: Mapping[str, Any] | None = None,
    modules: Sequence[str] | None = None,
    loss_fn: Callable[[Any], Any] | None = None,
    num_moments: int = 2,
) -> Workload:
    """The workload of a model, as a rule on the meta device; it is not changed.

    Layers of equal class and equal parameter shapes, of which the same train, are one kind, those that no
    gradient passes one of their own; the kind that computes most of those
    that repeat is called `layer`, an embedding of token ids `embedding`, a norm `norm`, a linear layer
    at the end `head`, others by their class. Of a kind's layers the one that keeps most bytes counts.

    Args:
        example_inputs: `[rows, ...]`, on any device; contents do not matter.
        dtype: what layers compute in; floating-point inputs are taken to have it.
        sequence_length: tokens of a row; None: as many as the first input has if it is `[rows, tokens]`
            of integers, else 1.
        name: of the model, for plans and profiles; empty: its class.
        kwargs: keyword arguments of the model's forward; tensors' contents do not matter.
        modules: names of the layers in the order in which they run; None: found by the model's structure.
        loss_fn: of what the model returns; what it computes counts to the last layer.
        num_moments: averages that the optimizer keeps of each parameter.

    Raises:
        ConfigError: The model cannot run on such inputs without memory, or has no layers.
    """
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    _check_arguments(inputs, dtype)
    names = find_layers(model) if modules is None else tuple(modules)
    require_layers(model, names)
    keywords = {**training_arguments(model), **(kwargs or {})}
    watch = _run(model, inputs, keywords, names, loss_fn, getattr(torch, dtype))
    if modules is None and (*watch.order,) != names:  # A model may register its head first.
        names = (*watch.order,)
        watch = _run(model, inputs, keywords, names, loss_fn, getattr(torch, dtype))
    records = watch.records
    layers = _count_parameters(model, names, records)
    kind_names = _name_kinds(layers)
    rows = inputs[0].shape[0]
    alike: defaultdict[str, list[_Layer]] = defaultdict(list)
    for layer in layers:
        alike[kind_names[layer.structure]].append(layer)
    kinds = {name: _make_kind(name, own, rows) for name, own in alike.items()}
    if sequence_length is None:
        has_tokens = inputs[0].dim() > 1 and not inputs[0].is_floating_point()
        sequence_length = inputs[0].shape[1] if has_tokens else 1
    ties = {
        (names[tie.owner_ministage], names[tie.borrower_ministage])
        for tie in find_ties(model, plan_of_layers(names))
    }
    return Workload(
        model=name or type(model).__name__,
        sequence_length=sequence_length,
        dtype=dtype,
        layers=tuple((layer.name, kind_names[layer.structure]) for layer in layers),
        kinds=kinds,
        ties=tuple(sorted(ties, key=lambda tie: (names.index(tie[0]), names.index(tie[1])))),
        num_moments=num_moments,
        max_tensor_parallel=count_pieces(model, names),
    )


def measure_causal_lm(model: nn.Module, *, sequence_length: int, dtype: str, name: str) -> Workload:
    """The workload of a causal LM of `transformers` with the loss of the training program; what is frozen is
    counted so.

    `name`: of the model without its adapters, whose rank the workload's name says too: `hf tiny lora 16`.
    Raises `ConfigError` where it does not run on rows of so many tokens.
    """
    tokens = torch.zeros(2, sequence_length, dtype=torch.int64, device="meta")
    whole_name = name + name_adapters(model)
    return measure_workload(model, tokens, dtype=dtype, name=whole_name, loss_fn=causal_lm_loss)


def _check_arguments(inputs: Sequence[Tensor], dtype: str) -> None:
    if dtype not in ITEMSIZES:
        raise ConfigError(f"workload: there is no dtype {dtype!r}; choose one of {', '.join(ITEMSIZES)}")
    if not inputs or not inputs[0].dim() or not inputs[0].shape[0]:
        raise ConfigError("workload: the example inputs have no rows; give tensors of [rows, ...]")


# -- the run ---------------------------------------------------------------------------------


def _run(
    model: nn.Module,
    inputs: Sequence[Tensor],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    loss_fn: Callable[[Any], Any] | None,
    dtype: torch.dtype,
) -> LayerWatch:
    mode = make_fake_mode()
    (copy,) = fake_copies([model], mode, param_dtype=dtype)
    use_grouped_experts(copy)
    keep_rotations(copy)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.zeros(leaf.shape, dtype=dtype if leaf.is_floating_point() else leaf.dtype, device="cpu")

    def compute() -> LayerWatch:
        with watch_layers(copy, names) as watch:
            output = copy(*arguments, **keywords)
            if loss_fn is not None:
                loss_fn(output)
        return watch

    with mode, torch.enable_grad():
        arguments = [fake(tensor) for tensor in inputs]
        keywords = {key: map_leaves(value, fake) for key, value in kwargs.items()}
        try:
            try:
                watch = compute()
            except ASKS_FOR_VALUES:
                with Guesses(True):
                    watch = compute()
        except Exception as error:
            raise ConfigError(
                f"model: {type(model).__name__} does not run on the example inputs without memory "
                f"({first_line(error)}); give inputs and kwargs= as in training"
            ) from error
    if idle := [name for name in names if name not in watch.order]:
        raise ConfigError(f"model: its forward does not call {idle[0]}; leave it out of modules=")
    return watch


def _count_parameters(
    model: nn.Module, names: Sequence[str], records: Mapping[str, LayerRecord]
) -> list[_Layer]:
    """The layers with their own parameters. A tied one belongs to the first layer that has it, one of
    a module around layers to the first of these."""
    counts, trainable, borrowed, borrowed_trainable = (Counter[str]() for _ in range(4))
    owner_of: dict[int, str] = {}
    seen: set[tuple[int, str]] = set()
    for layer, parameter in _place_parameters(model, names):
        if (id(parameter), layer) in seen:
            continue
        seen.add((id(parameter), layer))
        is_owner = owner_of.setdefault(id(parameter), layer) == layer
        number, trained = (counts, trainable) if is_owner else (borrowed, borrowed_trainable)
        number[layer] += parameter.numel()
        trained[layer] += parameter.numel() if parameter.requires_grad else 0
    return [
        _Layer(
            name,
            model.get_submodule(name),
            counts[name],
            trainable[name],
            borrowed[name],
            borrowed_trainable[name],
            records[name],
        )
        for name in names
    ]


def _place_parameters(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
    """Every parameter under each of its names, with the layer that it is in, by order of the layers."""
    loose = set(loose_parameters(model, plan_of_layers(names)))
    position = {name: i for i, name in enumerate(names)}
    placed = []
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        layer = plan_module(fqn, position)
        if layer is None and fqn in loose:
            around = fqn.rpartition(".")[0]
            layer = next(name for name in names if not around or name.startswith(f"{around}."))
        if layer is None:
            raise ConfigError(f"model: '{fqn}' is in none of modules=; add the module that has it")
        placed.append((layer, parameter))
    return sorted(placed, key=lambda entry: position[entry[0]])


# -- kinds -----------------------------------------------------------------------------------


def _name_kinds(layers: Sequence[_Layer]) -> dict[Structure, str]:
    """A name for each structure, each its own."""
    times = Counter(layer.structure for layer in layers)
    flops = Counter[Structure]()
    for layer in layers:
        flops[layer.structure] += layer.record.flops
    repeated = [structure for structure, number in times.items() if number > 1]
    main = max(repeated, key=lambda structure: flops[structure], default=None)
    names: dict[Structure, str] = {}
    for layer in layers:
        if layer.structure in names:
            continue
        name = "layer" if layer.structure == main else _name_alone(layer, is_last=layer is layers[-1])
        taken = sum(known == name or known.startswith(f"{name} ") for known in names.values())
        names[layer.structure] = f"{name} {taken + 1}" if taken else name
    return names


def _name_alone(layer: _Layer, *, is_last: bool) -> str:
    if is_last and isinstance(layer.module, nn.Linear):
        return "head"
    if not layer.record.input_elements and any(isinstance(m, nn.Embedding) for m in layer.module.modules()):
        return "embedding"
    name = type(layer.module).__name__
    return "norm" if name.endswith("Norm") else name


def _make_kind(name: str, layers: Sequence[_Layer], rows: int) -> LayerKind:
    """Of layers that are alike, with the largest figures of all: what all share, only the first one keeps."""
    first = layers[0]
    record = LayerRecord(*map(max, zip(*(astuple(layer.record) for layer in layers), strict=True)))

    def per_row(total: int) -> int:
        return math.ceil(total / rows)

    is_whole = first.num_trainable == first.num_parameters
    is_borrowed_whole = first.num_borrowed_trainable == first.num_borrowed
    is_returned = record.gradient_elements == record.input_elements
    is_twice = record.backward_flops == 2 * record.flops
    return LayerKind(
        name=name,
        num_parameters=first.num_parameters,
        num_trainable=None if is_whole else first.num_trainable,
        num_borrowed=first.num_borrowed,
        num_borrowed_trainable=None if is_borrowed_whole else first.num_borrowed_trainable,
        forward_flops_per_row=record.flops / rows,
        backward_flops_per_row=None if is_twice else record.backward_flops / rows,
        input_elements_per_row=per_row(record.input_elements),
        gradient_elements_per_row=None if is_returned else per_row(record.gradient_elements),
        output_elements_per_row=per_row(record.output_elements),
        activation_bytes_per_row=per_row(record.saved_bytes),
        working_bytes_per_row=per_row(record.working_bytes),
    )
