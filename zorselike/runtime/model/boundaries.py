"""What crosses the boundaries of ministages: shapes, dtypes and whether gradients come back.

Found once, by running copies of all ministages on fake tensors with two row counts: nothing is
negotiated at run time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from zorselike.cost.sizes import is_layer
from zorselike.errors import ConfigError
from zorselike.plan.plan import Plan
from zorselike.runtime._compat import ASKS_FOR_VALUES
from zorselike.runtime.model.nested import map_tensors
from zorselike.runtime.model.part import ModelPart
from zorselike.runtime.model.signature import KwargSpecs, Signature, TensorSpec, describe_kwargs, make_kwargs
from zorselike.runtime.model.tracing import (
    BufferWatch,
    FakeMode,
    Guesses,
    Recorder,
    fake_copies,
    find_place,
    lacks_member,
    without_caches,
)
from zorselike.text.wording import first_line, list_few, show_modules, suggest


def check_kwargs(names: Collection[str], parts: Sequence[ModelPart]) -> None:
    """Raises `ConfigError` for a keyword argument that no ministage's forward names."""
    for name in names:
        if not any(name in part.accepts for part in parts):
            known = sorted({known for part in parts for known in part.accepts})
            takes = f"they take {list_few(known)}" if known else "they take none"
            raise ConfigError(
                f"no ministage's forward has a keyword argument '{name}'{suggest(name, known)}; {takes}"
            )


# -- tracing -------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputBytes:
    """Size of a tensor that depends on a microbatch's rows."""

    fixed: int
    per_row: int

    def at(self, rows: int) -> int:
        return self.fixed + rows * self.per_row


@dataclass(frozen=True)
class Trace:
    """What one run over all ministages showed."""

    boundaries: tuple[Signature, ...]
    """Entry i enters ministage i; the last entry is what the last ministage returns."""
    unit_calls: tuple[tuple[str, ...], ...]
    """Names of the units of each ministage in the order of their calls."""
    sources: tuple[frozenset[str], ...]
    """Of these, which are given nothing that carries a gradient, such as embeddings."""
    changing: tuple[frozenset[str], ...]
    """Of these, which change in place what they are given, or buffers; `""` where the ministage as a whole
    does."""
    layer_inputs: tuple[tuple[InputBytes, ...], ...]
    """What the numbered layers of each ministage are given, each tensor once: what recomputation keeps."""


@dataclass(frozen=True)
class StepInputs:
    """What a step is given, as far as its traces depend on it."""

    inputs: Signature
    kwargs: KwargSpecs
    param_dtype: torch.dtype | None = None
    """In which layers compute."""

    def key(self) -> tuple[Hashable, ...] | None:
        """By which it is told from others; None where an argument cannot be."""
        key = (self.inputs, _freeze(self.kwargs), self.param_dtype)
        try:
            hash(key)
        except TypeError:
            return None
        return key


class Traces:
    """What fake runs of one model, cut in one way, have shown: who makes pipelines of it again and again is
    spared all but the first."""

    def __init__(self) -> None:
        self.is_proven = False
        """Whether the ministages were seen to compute what the model does, on guessed inputs at least."""
        self.mixes_no_positions = False
        """Whether that was seen of layers, outside of what tensor parallelism cuts."""
        self._found: dict[tuple[Hashable, ...], Trace] = {}

    def find(self, step: StepInputs) -> Trace | None:
        """That of such a step, if there was one."""
        key = step.key()
        return None if key is None else self._found.get(key)

    def keep(self, trace: Trace, step: StepInputs) -> None:
        """`find` gives it from now on, if such a step can be told from others."""
        key = step.key()
        if key is not None:
            self._found[key] = trace


def _freeze(value: Any) -> Any:
    """Containers as tuples, which can be hashed."""
    if isinstance(value, Mapping):
        return tuple((name, _freeze(entry)) for name, entry in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, *map(_freeze, value)
    return type(value).__name__, value


def trainable_ministages(parts: Sequence[ModelPart]) -> tuple[bool, ...]:
    """Whether each ministage has a parameter that requires a gradient."""
    return tuple(any(p.requires_grad for p in part.module.parameters()) for part in parts)


def trace_boundaries(
    parts: Sequence[ModelPart],
    plan: Plan,
    inputs: Signature,
    kwargs: Mapping[str, Any],
    *,
    trainable: Sequence[bool],
    param_dtype: torch.dtype | None = None,
) -> Trace:
    """Finds what crosses every boundary, by running the parts' copies on fake tensors.

    `kwargs` are a step's own, of any number of rows; `param_dtype` is what layers compute in
    (floating-point inputs of units are cast to it, as FSDP2 does). For a model that
    `torch.export` cuts, its graphs are made here.

    Raises `ConfigError`, naming the ministage, where one returns something other than a tensor
    or a tuple of them, where dimension 0 of a tensor is not rows, where no gradient can come back
    to a ministage that trains, or where a model does not follow the convention it is cut by; and
    for a keyword argument that no forward names.
    """
    check_kwargs(kwargs, parts)
    step = StepInputs(inputs, describe_kwargs(kwargs), param_dtype)
    return trace_step(parts, plan, step, trainable=trainable)


def trace_step(
    parts: Sequence[ModelPart], plan: Plan, step: StepInputs, *, trainable: Sequence[bool]
) -> Trace:
    """`trace_boundaries` of arguments that were described."""
    inputs, specs, param_dtype = step.inputs, step.kwargs, step.param_dtype
    skeleton = parts[0].skeleton
    with torch.enable_grad():
        skeleton.bind(inputs, specs, param_dtype)
        modules = fake_copies(skeleton.parts, skeleton.mode, param_dtype=param_dtype)
        if param_dtype is not None:
            for part, module in zip(parts, modules, strict=True):
                _cast_inputs(module, part, param_dtype)
        rows = few, more = skeleton.probe_rows
        run = partial(run_parts, parts, modules, inputs, specs, mode=skeleton.mode)
        try:
            both = run(few), run(more)
        except ConfigError as error:
            if not isinstance(error.__cause__, ASKS_FOR_VALUES):
                raise
            both = None
        if both is None:  # It branches on values: each way is gone once, but for one that only raises.
            ways = []
            for guess in (False, True):
                with Guesses(guess):
                    try:
                        ways.append((run(few), run(more)))
                    except ConfigError as error:
                        if (guess and not ways) or not _is_models_own(error.__cause__):
                            raise
            both = ways[-1]
            _unite_calls(parts, both[0][1], ways[0][0][1])
    (outputs, calls), (others, larger_calls) = both
    boundaries = [inputs]
    for index, (output, other) in enumerate(zip(outputs, others, strict=True)):
        where = name_ministage(plan, index)
        boundary = _compare(output, other, rows, where, is_last=index == len(parts) - 1)
        if not any(trainable[: index + 1]):
            boundary = Signature(tuple(replace(spec, requires_grad=False) for spec in boundary.tensors))
        elif not any(spec.requires_grad for spec in boundary.tensors):
            raise ConfigError(
                f"{where} returns nothing that carries a gradient, so it and those before it cannot "
                "train; do not detach there, or freeze their parameters"
            )
        boundaries.append(boundary)
    return Trace(
        boundaries=tuple(boundaries),
        unit_calls=tuple(tuple(call.name for call in recorder.calls) for recorder in calls),
        sources=tuple(
            frozenset(call.name for call in recorder.calls if not call.carries_grad) for recorder in calls
        ),
        changing=tuple(frozenset(a.changing | b.changing) for a, b in zip(calls, larger_calls, strict=True)),
        layer_inputs=tuple(
            _measure_layer_inputs(*both, rows) for both in zip(calls, larger_calls, strict=True)
        ),
    )


def _is_models_own(cause: BaseException | None) -> bool:
    """Whether a model raised it of its own will, as where it finds values that are not finite."""
    return cause is not None and not isinstance(cause, (ConfigError, *ASKS_FOR_VALUES))


def _unite_calls(
    parts: Sequence[ModelPart], calls: Sequence[Recorder], otherwise: Sequence[Recorder]
) -> None:
    """Notes with `calls` what changes in place otherwise. Raises `ConfigError` where values decide which
    layers are called."""
    for part, recorder, other in zip(parts, calls, otherwise, strict=True):
        this, that = ([call.name for call in own.calls] for own in (recorder, other))
        if this != that:
            raise ConfigError(
                f"{part.name} calls {', '.join(this)} or {', '.join(that)}, as the values of tensors say, "
                "and ranks must call the same; let it call all, and choose between results (torch.where)"
            )
        recorder.changing |= other.changing


def _measure_layer_inputs(few: Recorder, more: Recorder, rows: tuple[int, int]) -> tuple[InputBytes, ...]:
    """Of one ministage, from records of its calls with two row counts; each tensor once."""
    sizes: dict[int, InputBytes] = {}
    for call, larger in zip(few.calls, more.calls, strict=True):
        if is_layer(call.name):
            for (identity, low), (_, high) in zip(call.input_bytes, larger.input_bytes, strict=True):
                per_row = (high - low) // (rows[1] - rows[0])
                sizes[identity] = InputBytes(low - rows[0] * per_row, per_row)
    return tuple(sizes.values())


def run_parts(
    parts: Sequence[ModelPart],
    modules: Sequence[nn.Module],
    inputs: Signature,
    specs: KwargSpecs,
    rows: int,
    *,
    mode: FakeMode,
    all_trainable: bool = False,
) -> tuple[list[Any], list[Recorder]]:
    """Runs copies of the parts one after the other, each on leaves of what the one before gave: their outputs
    and records.

    `all_trainable`: every floating-point boundary carries a gradient.
    Raises `ConfigError` where one fails, or uses a unit's parameters without calling the unit.
    """
    outputs: list[Any] = []
    recorders: list[Recorder] = []
    with mode:
        tensors = tuple(inputs.zeros(rows))
        for part, module in zip(parts, modules, strict=True):
            where = part.name
            kwargs = {k: v for k, v in make_kwargs(specs, rows).items() if k in part.accepts}
            recorder = Recorder({name: module.get_submodule(name) for name in part.units})
            versions, buffers = [tensor._version for tensor in tensors], BufferWatch(module)
            output = run_module(module, tensors, kwargs, where, recorder)
            if [tensor._version for tensor in tensors] != versions or buffers.has_changed():
                recorder.changing.add("")
            for unit, parameter in recorder.strays.items():
                mend = f"call '{unit}', or name a module in the plan that contains all of its uses"
                if unit == parameter.rpartition(".")[0] and module.get_submodule(unit)._forward_pre_hooks:
                    mend = (
                        f"a hook before '{unit}' may do it, as that of torch.nn.utils.weight_norm: use "
                        f"torch.nn.utils.parametrizations, or {mend}"
                    )
                raise ConfigError(
                    f"{where} uses '{parameter}' outside the forward of '{unit}', so it is not gathered "
                    f"there; {mend}"
                )
            for unit in recorder.overwritten:
                raise ConfigError(
                    f"{where}: '{unit}' changes its input in place, of which sharding needs the gradient; "
                    "write x = x + y instead of x += y, and leave out inplace=True"
                )
            outputs.append(output)
            recorders.append(recorder)
            if part is parts[-1]:
                break
            tensors = as_boundary(output, where)
            _check_rows(tensors, rows, where, _CUT_MEND)
            tensors = tuple(
                # No leaves, which autograd forbids to change in place; here a copy takes no memory.
                t.detach()
                .requires_grad_(t.is_floating_point() and (t.requires_grad or all_trainable))
                .clone()
                for t in tensors
            )
    return outputs, recorders


def compare_calls(
    parts: Sequence[ModelPart], whole: Recorder, records: Sequence[Recorder], hint: str
) -> None:
    """Raises `ConfigError` unless the parts together called the same units as the whole model did, in that
    order, with arguments of the same shapes."""
    calls = [(i, call) for i, recorder in enumerate(records) for call in recorder.calls]
    for entry, expected in zip_longest(calls, whole.calls):
        index, found = entry or (len(parts) - 1, None)
        if found != expected:
            this = f"'{found.name}' with {found.arguments}" if found else "nothing more"
            that = f"'{expected.name}' with {expected.arguments}" if expected else "nothing more"
            raise ConfigError(f"{parts[index].name} calls {this} where the whole model calls {that}; {hint}")


def run_module(
    module: nn.Module, tensors: Sequence[Tensor], kwargs: Mapping[str, Any], where: str, recorder: Recorder
) -> Any:
    """What a copy returns, recorded; `ConfigError` with shapes and the first line where it fails."""
    shapes = _show_shapes(tensors)
    try:
        with recorder.recording(), without_caches(module):
            return module(*tensors, **kwargs)
    except ConfigError:
        raise
    except Exception as error:
        hint = ""
        if "'NoneType' object" in str(error):
            hint = "; a module of another ministage is None here, and this forward does not skip it"
        elif lacks_member(error):
            hint = "; what another ministage has of a list or dictionary of modules is not in it here"
        raise ConfigError(
            f"{where} fails on {shapes}: {first_line(error)}{find_place(error)}{hint}"
        ) from error


def check_crossing(tensors: Sequence[Tensor], boundary: Signature, rows: int, where: str) -> None:
    """Raises `ConfigError` where a ministage returned something else than it did when its shapes were
    found: the next rank waits for just those bytes and gradients."""
    found = [(tuple(t.shape), t.dtype) for t in tensors]
    expected = [((rows, *spec.shape_per_row), spec.dtype) for spec in boundary.tensors]
    if found != expected:
        raise ConfigError(
            f"{where} returns {_show_shapes(tensors)} for {rows} rows, but "
            f"{' and '.join(map(str, boundary.tensors))} when its shapes were found; they may depend "
            "neither on values nor on what changes between calls (a keyword argument) nor on an autocast "
            "(give param_dtype in its place), and layers must return the dtype that they compute in "
            "(residual_in_fp32 = False in a config)"
        )
    for i, (tensor, spec) in enumerate(zip(tensors, boundary.tensors, strict=True)):
        if tensor.requires_grad and not spec.requires_grad:
            raise ConfigError(
                f"tensor {i} that {where} returns carries a gradient, and carried none when its shapes were "
                "found; detach it always or never"
            )


def as_boundary(output: Any, where: str) -> tuple[Tensor, ...]:
    """What a ministage returned as a tuple of tensors.

    Raises `ConfigError` for anything but a tensor or a tuple of tensors, by its type.
    """
    entries = output if isinstance(output, tuple) else (output,)
    for i, entry in enumerate(entries):
        if not isinstance(entry, Tensor):
            place = f"a tuple with {_name_type(entry)} at {i}" if entries is output else _name_type(entry)
            raise ConfigError(
                f"{where} returns {place}; only tensors, or a tuple of them, cross to the next ministage"
            )
    if not entries:
        raise ConfigError(f"{where} returns an empty tuple; nothing crosses to the next ministage")
    return tuple(entries)


def as_model_output(output: Any, where: str) -> tuple[Tensor, ...]:
    """What the model returned (after `unpack`), as `as_boundary` does.

    Raises `ConfigError` with the hint `unpack=`, also for a loss computed inside the model.
    """
    example = f"unpack=lambda out: {_take_out(output)}"
    hint = f"pass unpack=, a function that takes the tensors out, such as {example}"
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    entries = output if isinstance(output, tuple) else (output,)
    has_scalar = any(isinstance(t, Tensor) and not t.dim() for t in entries)
    if has_scalar or (isinstance(loss, Tensor) and not isinstance(output, Tensor)):
        raise ConfigError(
            f"{where} returns a loss computed inside the model, which knows nothing of the global batch; "
            f"{hint}, and loss_fn= computes the loss (pass no labels to the model if it returns all logits "
            "without)"
        )
    try:
        return as_boundary(output, where)
    except ConfigError as error:
        raise ConfigError(f"{where} returns {_name_output(output)}; {hint}") from error


def _take_out(output: Any) -> str:
    """How to take the first tensor that has rows out of what a model returned."""
    if isinstance(output, dict) and not hasattr(output, "logits"):
        return next((f"out[{key!r}]" for key, t in output.items() if _has_rows(t)), "out['logits']")
    if isinstance(output, tuple | list) and not hasattr(output, "logits"):
        return next((f"out[{i}]" for i, t in enumerate(output) if _has_rows(t)), "out[0]")
    return "out.logits"


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _name_output(output: Any) -> str:
    if isinstance(output, tuple) and output:
        return f"a tuple of {list_few(_name_type(entry) for entry in output)}"
    return _name_type(output)


def _name_type(value: Any) -> str:
    if value is None:
        return "None"
    name = "Tensor" if isinstance(value, Tensor) else type(value).__name__
    inside = f" of {_name_type(value[0]).split()[-1]}" if isinstance(value, list | tuple) and value else ""
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}{inside}"


def name_ministage(plan: Plan, index: int) -> str:
    """`ministage 2 (layers.4 .. layers.7)`."""
    return f"ministage {index} ({show_modules(plan.ministages[index].modules)})"


_CUT_MEND = "cut elsewhere, or pass split="
_OUTPUT_MEND = "pass unpack= to give it rows"


def _compare(few: Any, more: Any, rows: tuple[int, int], where: str, *, is_last: bool) -> Signature:
    """What one ministage returned for two row counts, as a boundary."""
    convert = as_model_output if is_last else as_boundary
    mend = _OUTPUT_MEND if is_last else _CUT_MEND
    tensors, others = convert(few, where), convert(more, where)
    _check_rows(tensors, rows[0], where, mend)
    _check_rows(others, rows[1], where, mend)
    first, second = ([(tuple(t.shape[1:]), t.dtype) for t in side] for side in (tensors, others))
    if first != second:
        raise ConfigError(
            f"{where} returns {_show_shapes(tensors)} for {rows[0]} rows, but {_show_shapes(others)} for "
            f"{rows[1]}; nothing but dimension 0 may depend on the rows; {mend}"
        )
    return Signature(tuple(TensorSpec(tuple(t.shape[1:]), t.dtype, t.requires_grad) for t in tensors))


def _check_rows(tensors: Sequence[Tensor], rows: int, where: str, mend: str) -> None:
    for i, tensor in enumerate(tensors):
        if not tensor.dim() or tensor.shape[0] != rows:
            raise ConfigError(
                f"tensor {i} that {where} returns is {list(tensor.shape)} for {rows} rows; dimension 0 must "
                f"be rows; {mend}"
            )


def _show_shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)


def _cast_inputs(module: nn.Module, part: ModelPart, dtype: torch.dtype) -> None:
    """Casts what enters the ministage and its units, as FSDP2's mixed precision does."""

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(args, to_dtype), map_tensors(kwargs, to_dtype)

    def to_dtype(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    units = [module.get_submodule(name) for name in part.units]
    for target in [module, *(unit for unit in units if any(True for _ in unit.parameters()))]:
        target.register_forward_pre_hook(cast, with_kwargs=True)
