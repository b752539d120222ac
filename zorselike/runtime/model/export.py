"""Ministages of a model that no structure cuts, out of the graph that `torch.export` makes of it.

The graph is captured when the model's inputs are known, once per number of rows that a rank
computes, since what is captured of `view(b, t, -1, d)` holds for one number only. Each ministage
begins where the first of its modules is called, marked with
`torch.distributed.pipelining.pipe_split`. `zorselike/runtime/model/graphs.py` cuts the graph there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zorselike.errors import ConfigError
from zorselike.plan.plan import Plan
from zorselike.runtime.model.boundaries import as_model_output, name_ministage
from zorselike.runtime.model.graphs import CannotCut, Flow, find_layout
from zorselike.runtime.model.nested import leaves, map_leaves, tensors_in
from zorselike.runtime.model.pruning import find_units, loose_parameters, plan_module, prune
from zorselike.runtime.model.signature import KwargSpecs, KwargTensor, Signature, make_kwargs
from zorselike.runtime.model.stage_graph import StageGraph
from zorselike.runtime.model.tracing import Skeleton, fake_copies, find_place, without_caches
from zorselike.text.wording import first_line

_INNER = "model"
"""Attribute of `_Flat` that holds the captured model, the first part of every captured name."""


class Exporter(Skeleton):
    """Cuts one model; its `modules` hold a ministage's parameters each and run its graphs."""

    def __init__(
        self, model: nn.Module, plan: Plan, *, unpack: Callable[[Any], Any] | None, why_needed: str
    ) -> None:
        """`why_needed`: why no other way took the model, for messages."""
        super().__init__()
        self._model = model
        self._plan = plan
        self._unpack = unpack
        self._why_needed = why_needed
        self._aliases = _find_aliases(model)
        self._replicas = {n: b for n, b in model.named_buffers(remove_duplicate=False) if not b.is_meta}
        homes = _place_loose(model, plan)
        self.modules = prune(model, [m.modules for m in plan.ministages], homes=homes)
        self._homes = {f"{_INNER}.{name}": i for name, i in homes.items() if len(self._aliases[name]) == 1}
        self._held = [_names_held(module) for module in self.modules]
        for index, module in enumerate(self.modules):
            module.forward = ExportedForward(module, self, index)  # type: ignore[method-assign]
        because = f" ({why_needed})" if why_needed else ""
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        hooks = "hooks that note or print something run at its capture alone, " if hooked else ""
        self.takes_any_shape = False
        self.note = (
            f"{type(model).__name__} is cut by torch.export{because}: each ministage is one FSDP unit, which "
            "ZeRO 3 gathers and recomputation recomputes as a whole, layers are not compiled, attention gets "
            f"a mask where is_causal would do, {hooks}and every step must have the first one's shapes and "
            "arguments"
        )
        self._bound: tuple[Signature, KwargSpecs, torch.dtype | None] | None = None
        self._flows: dict[tuple[int, bool | None], Flow] = {}
        self._graphs: dict[tuple[int, int, bool | None, torch.device], StageGraph] = {}
        self._layout: list[list[bool]] = []
        self.kwarg_places: list[tuple[str, int]] = []
        """Of every tensor in keyword arguments: the argument, and its number within."""
        self.returns_tuple = False

    @property
    def probe_rows(self) -> tuple[int, int]:
        """Two of the plan's row counts where it has two (their graphs are needed anyway)."""
        planned = {m.num_rows for group in self._plan.groups for m in group.microbatches} - {1}
        few, more, *_ = [*sorted(planned), *sorted({2, 3} - planned)]
        return few, more

    def bind(self, inputs: Signature, kwargs: KwargSpecs, param_dtype: torch.dtype | None) -> None:
        """Captures the model on its true inputs; `ConfigError` where it cannot be captured or cut."""
        if self._bound == (inputs, kwargs, param_dtype):
            return
        self._bound = (inputs, kwargs, param_dtype)
        self._flows.clear()
        self._graphs.clear()
        self.kwarg_places = [
            (name, number) for name, spec in kwargs.items() for number in range(len(_tensors_of(spec)))
        ]
        few, more = self.probe_rows
        try:
            self._layout = find_layout(self._flow(few, None), self._flow(more, None), (few, more))
        except CannotCut as error:
            raise self._refuse(str(error)) from error

    def graph(self, index: int, rows: int, *, training: bool, device: torch.device) -> StageGraph:
        """A ministage's graph for microbatches of `rows` rows; captured when first asked for."""
        mode = None if training else False
        key = (index, rows, mode, device)
        if key not in self._graphs:
            # The first forward of a microbatch asks: whoever keeps what that saves for its backward (a
            # checkpoint, an offload) must not see what the capture saves.
            with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
                flow = self._flow(rows, mode)
            try:
                graph = flow.build(index, self._layout, device)
            except CannotCut as error:
                raise self._refuse(str(error)) from error
            self._resolve(graph, index)
            self._graphs[key] = graph
        return self._graphs[key]

    def _flow(self, rows: int, training: bool | None) -> Flow:
        """The captured graph for a row count; `training` None: each module in its own mode."""
        key = (rows, training)
        if key not in self._flows:
            self._flows[key] = self._capture(rows, training)
        return self._flows[key]

    def _capture(self, rows: int, training: bool | None) -> Flow:
        assert self._bound is not None, "the exporter knows no inputs yet"
        inputs, kwargs, param_dtype = self._bound
        (whole,) = fake_copies([self.whole], self.mode, param_dtype=param_dtype)
        if training is False:
            whole.eval()
        for names in self._starts(whole):
            whole.get_submodule(names).register_forward_pre_hook(_mark_start)
        with self.mode:
            tensors = inputs.zeros(rows)
            tensors += tensors_in(make_kwargs(kwargs, rows))
            if param_dtype is not None:
                tensors = [t.to(param_dtype) if t.is_floating_point() else t for t in tensors]
        flat = _Flat(whole, len(inputs.tensors), kwargs, self._returned)
        try:
            with _refusing_own_backwards(whole), without_caches(whole):
                program = torch.export.export(flat, tuple(tensors), strict=False)
        except CannotCut as error:
            raise self._refuse(str(error)) from error
        except ConfigError:
            raise
        except Exception as error:
            raise self._refuse(f"{first_line(error)}{find_place(error)}") from error
        has_rows = [True] * len(inputs.tensors) + [leaf.has_rows for leaf in _tensors_of(dict(kwargs))]
        try:
            return Flow(
                program,
                [name_ministage(self._plan, i) for i in range(len(self.modules))],
                num_inputs=len(inputs.tensors),
                has_rows=has_rows,
                rows=rows,
                is_replica=lambda name: self._is_everywhere(_strip(name)),
                homes=self._homes,
            )
        except CannotCut as error:
            raise self._refuse(str(error)) from error

    def _returned(self, output: Any) -> tuple[Tensor, ...]:
        """What the model returned, as the graph shall. Noted here: export puts back what a module changes."""
        if self._unpack is not None:
            output = self._unpack(output)
        self.returns_tuple = isinstance(output, tuple)
        return as_model_output(output, "the last ministage")

    def _is_everywhere(self, buffer: str) -> bool:
        """Whether every ministage has a buffer, or can have its values."""
        return buffer in self._replicas or all(buffer in buffers for _, buffers in self._held)

    def _starts(self, whole: nn.Module) -> list[str]:
        """Where each ministage but the first begins: at the first of its units with parameters."""
        starts = []
        for index, ministage in list(enumerate(self._plan.ministages))[1:]:
            units = find_units(whole, ministage.modules)
            with_parameters = [u for u in units if any(True for _ in whole.get_submodule(u).parameters())]
            if not units:
                raise self._refuse(f"{name_ministage(self._plan, index)} has no module that is called")
            starts.append((with_parameters or units)[0])
        return starts

    def _resolve(self, graph: StageGraph, index: int) -> None:
        """Replaces captured names by those that the ministage's module has."""
        where = name_ministage(self._plan, index)
        parameters, buffers = self._held[index]
        for i, name in enumerate(map(_strip, graph.parameters)):
            here = [alias for alias in self._aliases[name] if alias in parameters]
            if not here:
                raise self._refuse(
                    f"{where} uses '{name}', which the plan gives to another ministage: register it "
                    "once more, in a module of its own that the plan has there; or, if it is used there "
                    "alone, list its module there (modules are listed in the order in which they run)"
                )
            graph.parameters[i] = here[0]
        for i, name in enumerate(map(_strip, graph.buffers)):
            if name not in buffers and (name in graph.mutated_buffers or name not in self._replicas):
                raise self._refuse(
                    f"{where} uses the buffer '{name}', which the plan gives to another ministage"
                )
            graph.buffers[i] = name
        for i, (name, value) in enumerate(graph.constants):
            if _is_fake(value):  # an attribute of some module: its contents are the model's
                graph.constants[i] = (name, attrgetter(_strip(name))(self._model))

    def buffer(self, module: nn.Module, index: int, name: str) -> Tensor:
        """A buffer of the ministage's, or of another's if it never changes."""
        if name in self._held[index][1]:
            return module.get_buffer(name)
        return self._replicas[name]

    def check_kwargs(self, kwargs: dict[str, Any], rows: int) -> None:
        """Raises `ConfigError` where arguments differ from those that the graphs were made for."""
        assert self._bound is not None
        for name in self._bound[1].keys() | kwargs.keys():
            spec = self._bound[1].get(name)
            expected = map_leaves(spec, lambda x: x.shape_at(rows) if isinstance(x, KwargTensor) else x)
            found = map_leaves(kwargs.get(name), lambda x: tuple(x.shape) if isinstance(x, Tensor) else x)
            if found != expected:
                raise ConfigError(
                    f"{name}= {_tell(found)}, and {_tell(expected)} in the first step, for which "
                    "torch.export made this model's graphs; give the same arguments, of the same shapes, in "
                    "every step (a mask of ones masks nothing), or pass split="
                )

    def _refuse(self, reason: str) -> ConfigError:
        tried = f" (tried because: {self._why_needed})" if self._why_needed else ""
        return ConfigError(
            f"torch.export cannot cut this model: {reason.rstrip('.')}; pass split=, a function that makes "
            f"each ministage's module{tried}"
        )


_SAME_BACKWARD = frozenset({"transformers.models.bloom.modeling_bloom.GeLUFunction"})
"""Functions whose backward is that of the operations of their forward, so that nothing is lost."""
_capturing = Lock()


@contextmanager
def _refusing_own_backwards(model: nn.Module) -> Iterator[None]:
    """Inside, what has a backward of its own raises `CannotCut` in this thread: export keeps the forward
    alone."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            what = f"'{name}'" if name else "the model"
            raise CannotCut(f"{what} has a backward hook, which would be lost")
    function, register_hook, own = torch.autograd.Function, Tensor.register_hook, get_ident()
    apply = vars(function)["apply"]

    def refuse_function(cls: Any) -> None:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if get_ident() == own and not name.startswith("torch.") and name not in _SAME_BACKWARD:
            raise CannotCut(f"the backward of {cls.__qualname__}, an autograd.Function, would be lost")

    def apply_known(cls: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_function(cls)
        return apply.__get__(None, cls)(*args, **kwargs)

    def forward_known(cls: Any, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            refuse_function(cls)
            return forward.__get__(None, cls)(*args, **kwargs)

        return staticmethod(run)

    def refuse(tensor: Tensor, hook: Any) -> Any:
        if get_ident() == own:
            raise CannotCut("a tensor's gradient hook, registered in a forward, would be lost")
        return register_hook(tensor, hook)  # type: ignore[no-untyped-call]

    # An `apply` that was bound before, as in `scan = Scan.apply`, is out of reach, but not what it calls.
    forwards = {cls: vars(cls)["forward"] for cls in _subclasses(function) if "forward" in vars(cls)}
    with _capturing:
        for cls, forward in forwards.items():
            cls.forward = forward_known(cls, forward)
        function.apply = classmethod(apply_known)  # type: ignore[method-assign, assignment]
        Tensor.register_hook = refuse  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            function.apply, Tensor.register_hook = apply, register_hook  # type: ignore[method-assign]
            for cls, forward in forwards.items():
                cls.forward = forward


def _subclasses(cls: Any) -> set[Any]:
    return {found for below in cls.__subclasses__() for found in (below, *_subclasses(below))}


class ExportedForward:
    """The forward of one ministage's module: the graph for the rows at hand, on its parameters."""

    def __init__(self, module: nn.Module, exporter: Exporter, index: int) -> None:
        self._module = module
        self._exporter = exporter
        self._index = index

    def __call__(self, *tensors: Tensor, **kwargs: Any) -> Any:
        rows, device = tensors[0].shape[0], tensors[0].device
        exporter = self._exporter
        exporter.check_kwargs(kwargs, rows)
        graph = exporter.graph(self._index, rows, training=self._module.training, device=device)
        passed = {name: tensors_in(value) for name, value in kwargs.items()}
        places = [exporter.kwarg_places[number] for number in graph.kwargs]
        given = [*tensors, *(passed[name][number] for name, number in places)]
        arguments = [
            # Mixed precision casts what enters a module; the graph has casts of its own.
            tensor if tensor.dtype == dtype else tensor.to(dtype)
            for tensor, dtype in zip(given, graph.dtypes, strict=True)
        ]
        fixed = [exporter.buffer(self._module, self._index, name) for name in graph.buffers]
        fixed += [value for _, value in graph.constants]
        outputs = graph.module(
            *arguments,
            # Looked up now: FSDP2 puts whole parameters in the place of sharded ones.
            *(attrgetter(name)(self._module) for name in graph.parameters),
            *(_like(value, tensors[0]) for value in fixed),
        )
        is_last = self._index == len(exporter.modules) - 1
        as_tuple = exporter.returns_tuple if is_last else len(outputs) > 1
        return tuple(outputs) if as_tuple else outputs[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> ExportedForward:
        return ExportedForward(copy.deepcopy(self._module, memo), self._exporter, self._index)


class _Flat(nn.Module):
    """A model that takes tensors in one row and returns tensors, as the graph shall."""

    def __init__(
        self,
        model: nn.Module,
        num_inputs: int,
        kwargs: KwargSpecs,
        returned: Callable[[Any], tuple[Tensor, ...]],
    ) -> None:
        super().__init__()
        setattr(self, _INNER, model)
        self._num_inputs = num_inputs
        self._kwargs = kwargs
        self._returned = returned

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        rest = iter(flat[self._num_inputs :])
        kwargs = {
            name: map_leaves(spec, lambda leaf: next(rest) if isinstance(leaf, KwargTensor) else leaf)
            for name, spec in self._kwargs.items()
        }
        return self._returned(getattr(self, _INNER)(*flat[: self._num_inputs], **kwargs))


def _tell(value: Any) -> str:
    return "is left out" if value is None else f"is {value}"


def _mark_start(*_: Any) -> None:
    from torch.distributed.pipelining import pipe_split  # a second, which few models need

    pipe_split()  # type: ignore[no-untyped-call]


def _strip(name: str) -> str:
    """A captured name as the model has it."""
    return name.removeprefix(f"{_INNER}.")


def _tensors_of(spec: Any) -> list[KwargTensor]:
    """Descriptions of the tensors within keyword arguments, in order."""
    return [leaf for leaf in leaves(spec) if isinstance(leaf, KwargTensor)]


def _find_aliases(model: nn.Module) -> dict[str, list[str]]:
    """All names of the parameter that each name means."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def _names_held(module: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the parameters and buffers of a ministage."""
    return (
        frozenset(name for name, _ in module.named_parameters(remove_duplicate=False)),
        frozenset(name for name, _ in module.named_buffers(remove_duplicate=False)),
    )


def _place_loose(model: nn.Module, plan: Plan) -> dict[str, int]:
    """A ministage for parameters outside the plan's modules: that of the module before them."""
    loose = set(loose_parameters(model, plan))
    homes: dict[str, int] = {}
    current = 0
    for name, _ in model.named_parameters(remove_duplicate=False):
        module = plan_module(name, plan.ministage_of)
        if module is not None:
            current = plan.ministage_of[module]
        elif name in loose:
            homes[name] = current
    return homes


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _is_fake(tensor: Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


def _like(value: Tensor, example: Tensor) -> Tensor:
    """A tensor where the example is: on its device, or fake as it is."""
    if _is_fake(example):
        return value if _is_fake(value) else example.fake_mode.from_tensor(value)  # type: ignore[attr-defined]
    return value.to(example.device)
