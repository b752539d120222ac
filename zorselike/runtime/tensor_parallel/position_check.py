"""Whether layers that are cut compute each position by itself outside of their cut blocks.

Between its blocks a rank of a replica has some positions of the sequence alone. What would look at others
there, such as a convolution or a running mean, would compute something else without failing. So each layer
runs once on fake tensors, and what it does to hidden states outside of its blocks must be known to treat
positions alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zorselike.errors import ConfigError
from zorselike.runtime.model.boundaries import StepInputs, run_module, run_parts
from zorselike.runtime.model.decoder_probe import BY_SHAPE, hidden_states
from zorselike.runtime.model.nested import tensors_in
from zorselike.runtime.model.part import ModelPart
from zorselike.runtime.model.signature import make_kwargs
from zorselike.runtime.model.tracing import Recorder, fake_copies
from zorselike.runtime.tensor_parallel.styles import Block, Blocks

_POINTWISE = frozenset(
    (
        *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "rdiv", "idiv"),
        *("truediv", "rtruediv", "itruediv", "pow", "rpow", "square", "sqrt", "rsqrt", "reciprocal", "neg"),
        *("exp", "log", "abs", "clamp", "where", "lerp", "addcmul", "tanh", "sigmoid", "erf", "dropout"),
        *("relu", "gelu", "silu", "softplus", "leaky_relu", "elu", "hardtanh", "relu6", "mish", "prelu"),
        *("to", "type", "type_as", "float", "double", "half", "bfloat16", "clone", "contiguous", "detach"),
        *("requires_grad", "get", "expand_as", "view_as", "alias", "identity"),
    )
)
"""What computes each number of its result from the same place of its arguments."""
_OF_LAST = frozenset(("mean", "sum", "var", "std", "amax", "softmax", "log_softmax", "norm", "vector_norm"))
"""What does so position by position, where it goes over the last dimension."""
_NORMS = frozenset(("layer_norm", "rms_norm"))
_TRANSPOSED = frozenset(("T", "mT", "H", "mH"))


def refuse_mixed_positions(parts: Sequence[ModelPart], blocks: Blocks, step: StepInputs) -> None:
    """Raises `ConfigError` for a layer that may mix positions outside of its blocks, naming what does it.

    Args:
        parts: of a model that is cut between its layers.
        blocks: what is cut of each layer.
        step: what steps are given.
    """
    skeleton = parts[0].skeleton
    rows = skeleton.probe_rows[0]
    with ExitStack() as stack:
        if skeleton.sample is None:
            modules = fake_copies(skeleton.parts, skeleton.mode, param_dtype=step.param_dtype)
            for part, module in zip(parts, modules, strict=True):
                _watch(module, [name for name in part.units if name in blocks], blocks, stack)
            run_parts(parts, modules, step.inputs, step.kwargs, rows, mode=skeleton.mode)
            return
        (sample,) = fake_copies([skeleton.sample], skeleton.mode, param_dtype=step.param_dtype)
        _watch(sample, [name for name in blocks if _computes(sample, blocks[name])], blocks, stack)
        with skeleton.mode:
            tensors = step.inputs.zeros(rows)
            run_module(sample, tensors, make_kwargs(step.kwargs, rows), "the model", Recorder({}))


def _computes(sample: nn.Module, blocks: Sequence[Block]) -> bool:
    """Whether a layer is there, and no stand-in."""
    names = {name for name, _ in sample.named_modules()}
    return all(block.name in names for block in blocks)


def _watch(module: nn.Module, layers: Sequence[str], blocks: Blocks, stack: ExitStack) -> None:
    for name in layers:
        inside = [module.get_submodule(block.name) for block in blocks[name]]
        stack.enter_context(_Watch(name, module.get_submodule(name), inside).hooked())


class _Watch(TorchFunctionMode):
    """Entered while a layer runs: follows what comes of hidden states."""

    def __init__(self, name: str, layer: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._layer, self._blocks = name, layer, blocks
        self._hidden: dict[int, Tensor] = {}
        """What depends on them, by identity, alive so that no identity is used twice."""
        self._num_inside = 0
        """How many blocks it is in."""

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside, runs of the layer are watched."""
        compute = self._layer.forward
        self._layer.forward = self._watching(compute)
        with ExitStack() as stack:
            for block in self._blocks:
                stack.callback(block.register_forward_pre_hook(self._enter_block).remove)
                stack.callback(block.register_forward_hook(self._leave_block).remove)
            yield
        self._layer.forward = compute

    def _watching(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._note([hidden_states(args, kwargs)])
            with self:
                output = compute(*args, **kwargs)
            self._hidden.clear()
            return output

        return forward

    def _enter_block(self, *_: Any) -> None:
        self._num_inside += 1

    def _leave_block(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._num_inside -= 1
        self._note(tensors_in(output)[:1])

    def _note(self, tensors: Sequence[Tensor]) -> None:
        self._hidden |= {id(tensor): tensor for tensor in tensors}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if self._num_inside or name in BY_SHAPE:
            return result
        used = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) in self._hidden]
        made = tensors_in(result)
        if used and (made or name == "__setitem__"):
            if not _is_local(func, name.strip("_"), used[0], args, kwargs):
                raise ConfigError(
                    f"'{self._name}' does '{name}' with hidden states outside of the modules that tp_plan "
                    "cuts, where a rank of a replica has some positions of the sequence alone, and it is not "
                    "known to treat each by itself: do it inside such a module, or list single ranks in the "
                    "plan"
                )
            self._note(made)
        return result


def _is_local(func: Any, name: str, hidden: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if name == "get":  # Of an attribute.
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _TRANSPOSED
    if name in _NORMS:
        return len(kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())) == 1
    if name in _OF_LAST:
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dims = dims if isinstance(dims, list | tuple) else [dims]
        return all(dim in (-1, hidden.dim() - 1) for dim in dims) and hidden.dim() > 2
    return name in _POINTWISE
