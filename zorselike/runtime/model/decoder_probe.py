"""Whether a causal LM may be cut before each of its modules: proven on fake tensors, by what flows where.

A ministage runs the model's own forward from the hidden states that enter it. That is right if those are
all that it needs of what ministages before it computed; masks, positions and rotary tables, which follow from
arguments and shapes alone, each ministage makes itself. One run in which only one layer of each class
computes shows what every module is given and what it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zorselike.runtime._compat import version_of
from zorselike.runtime.model.causal_lm import Decoder
from zorselike.runtime.model.nested import tensors_in
from zorselike.runtime.model.pruning import replace_modules

BY_SHAPE = {
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
}
"""What takes a tensor's shape and dtype, and none of its values."""
_BY_FIRST = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
"""What takes values of its first argument only."""


# -- layers that do not compute ------------------------------------------------------------


@dataclass
class ReturnForm:
    """How layers of one class return hidden states."""

    num_entries: int | None = None
    """Of a tuple or list that begins with them; None: they are returned themselves."""

    def of(self, hidden: Tensor) -> Any:
        return hidden if self.num_entries is None else (hidden, *[None] * (self.num_entries - 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> ReturnForm:
        return self  # What one copy of a layer shows is known of all.


def copy_plain_attributes(source: nn.Module, target: nn.Module) -> None:
    """What code around layers asks them for: numbers, names and flags, such as the kind of attention."""
    for key, value in vars(source).items():
        if isinstance(value, str | int | float | bool) and key not in vars(target):
            setattr(target, key, value)


class LightLayer(nn.Module):
    """In a decoder layer's place: its output has the shape, dtype and need of a gradient of the layer's, and
    nothing is computed."""

    def __init__(self, layer: nn.Module, form: ReturnForm) -> None:
        super().__init__()
        parameters = list(layer.parameters())
        trains = any(p.requires_grad for p in parameters)
        dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype, device="cpu"), requires_grad=trains)
        self.form = form
        copy_plain_attributes(layer, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.form.of(hidden_states(args, kwargs) + self.weight.sum())


def with_light_layers(model: nn.Module, decoder: Decoder, forms: Mapping[type, ReturnForm]) -> nn.Module:
    """The model, or one ministage of it, with light layers in the place of the decoder layers that it has."""
    layers = {name: model.get_submodule(name) for name in decoder.layers}
    light = {
        name: LightLayer(layer, forms[type(layer)]) for name, layer in layers.items() if type(layer) in forms
    }
    return replace_modules(model, light)


def with_one_layer_of_each_class(
    model: nn.Module, decoder: Decoder
) -> tuple[nn.Module, dict[type, ReturnForm]]:
    """The model with light layers but for the first of each class, and how each class returns, which is known
    once the model has run."""
    forms: dict[type, ReturnForm] = {}
    light: dict[str, nn.Module] = {}
    for name in decoder.layers:
        layer = model.get_submodule(name)
        if type(layer) in forms:
            light[name] = LightLayer(layer, forms[type(layer)])
        else:
            forms[type(layer)] = ReturnForm()
    return replace_modules(model, light), forms


def hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor among a module's arguments that it transforms: the first."""
    return tensors_in((args, dict(kwargs)))[0]


def with_hidden_states(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other hidden states."""
    old = hidden_states(args, kwargs)
    return (
        tuple(hidden if value is old else value for value in args),
        {key: hidden if value is old else value for key, value in kwargs.items()},
    )


# -- what flows where ----------------------------------------------------------------------


@dataclass
class Flow:
    """What one run showed."""

    order: list[str] = field(default_factory=list)
    """The modules of a `Decoder` in the order of their first calls."""
    first_cut: int = 0
    """The first place in `order` before which the model may be cut: at the first layer."""
    broken: dict[str, str] = field(default_factory=dict)
    """Modules before which it may not, and why."""
    widths: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of modules outside the layers, the last dimension of their output, and how many it has; the others are
    the first of their input's."""
    embedding_width: int = 0
    """Last dimension of what the model takes as `inputs_embeds`."""


class FlowRecorder(TorchFunctionMode):
    """Follows, while it is entered, values that depend on the inputs or on parameters.

    Each such value is of the generation of the last module that began before it was made. A value of an
    earlier generation that is used later, other than as the next module's hidden states, would not be there
    if the model were cut between the two.
    """

    def __init__(self, model: nn.Module, decoder: Decoder, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flow = Flow()
        self._layers = set(decoder.layers)
        self._modules = {name: model.get_submodule(name) for name in (*decoder.layers, *decoder.others)}
        self._embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._forms: Mapping[type, ReturnForm] = {}
        self._generation = 0
        self._generations: dict[int, int] = {}
        self._kept: list[Tensor] = []  # ids stay unique only while their objects live
        self._parameters = {id(p) for p in model.parameters()}
        self._num_active = 0
        self._called: set[str] = set()
        self._embedded: list[tuple[Tensor, int]] = []
        self._mark(inputs)

    @contextmanager
    def following(self, forms: Mapping[type, ReturnForm]) -> Iterator[Flow]:
        """Follows what runs inside; `forms` learn how layers that compute return."""
        self._forms = forms
        with ExitStack() as stack:
            for name, module in self._modules.items():
                enter = module.register_forward_pre_hook(self._enter(name), with_kwargs=True)
                leave = module.register_forward_hook(self._leave(name), with_kwargs=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            stack.callback(self._embedding.register_forward_hook(self._note_embedding).remove)
            with self:
                yield self.flow
        if any(version_of(embedded) != version for embedded, version in self._embedded):
            self._break(0, "its forward changes embeddings in place, of which later ministages have none")

    def _mark(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._generations[id(tensor)] = self._generation
            self._kept.append(tensor)

    def _break(self, since: int, reason: str) -> None:
        """No cut between generation `since` and now."""
        order, first = self.flow.order, self.flow.first_cut
        for position in range(since, self._generation):
            self.flow.broken.setdefault(order[first + position], reason)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in BY_SHAPE:
            return result
        used = tensors_in(args[:1] if name in _BY_FIRST else (args, kwargs))
        changed = tensors_in(args[:1]) if name == "__setitem__" else tensors_in(result)
        if not changed:
            return result
        of_parameters = any(id(tensor) in self._parameters for tensor in used)
        if of_parameters and not self._num_active:
            self._break(0, f"its parameters are used by '{name}' outside the modules that have them")
        ages = [self._generations[id(tensor)] for tensor in used if id(tensor) in self._generations]
        if ages and min(ages) < self._generation:
            self._break(min(ages), f"'{name}' uses again what was computed before it")
        if ages or of_parameters:
            self._mark(changed)
        return result

    def _enter(self, name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            self._num_active += 1
            if self._num_active > 1:
                return None
            flow, is_again = self.flow, name in self._called
            if not is_again:
                self._called.add(name)
                flow.order.append(name)
            if not self._generation and name not in self._layers:
                flow.first_cut = len(flow.order)
                return None
            if is_again:
                self._break(0, f"'{name}' is called more than once")
                return None
            return self._next_generation(name, args, kwargs)

        return enter

    def _next_generation(self, name: str, args: Any, kwargs: Any) -> Any:
        """The module gets its hidden states as a value of a generation of its own."""
        hidden = hidden_states(args, kwargs)
        given = [t for t in tensors_in((args, kwargs)) if t is not hidden]
        fresh = hidden.view_as(hidden)
        self._generation += 1
        old = [self._generations[id(t)] for t in given if id(t) in self._generations]
        if old:
            self._break(min(old), f"'{name}' is given more than hidden states of what was computed before")
        self._mark([fresh])
        return with_hidden_states(args, kwargs, fresh)

    def _leave(self, name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._num_active -= 1
            if name in self._layers:
                form = self._forms.get(type(module))
                if form is not None:
                    form.num_entries = len(output) if isinstance(output, tuple | list) else None
            elif isinstance(output, Tensor) and tensors_in((args, kwargs)):
                num_dims, entered = output.dim(), hidden_states(args, kwargs).shape
                if num_dims > 2 and output.shape[:-1] == entered[: num_dims - 1]:
                    self.flow.widths[name] = (output.shape[-1], num_dims)

        return leave

    def _note_embedding(self, module: nn.Module, args: Any, output: Any) -> None:
        self.flow.embedding_width = output.shape[-1]
        self._embedded.append((output, version_of(output)))
