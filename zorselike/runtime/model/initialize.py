"""Weights that depend on a seed and on names alone, so on no plan.

A model built on the meta device is materialised one named unit at a time. What draws its random numbers is
always the same module, whatever the unit, with a seed made of (seed, that module's fully qualified name):
walking down, a module that defines `init_weights` initialises everything below it; otherwise one that defines
`reset_parameters` does; what they leave out, the modules below initialise in the same way. The model's root
is never asked to initialise everything, since no rank holds everything. Adapters of `peft` are initialised as
it does (`reset_lora_parameters`), whatever else there is.

Numbers are drawn on the CPU and then moved, so they are the same on every device. Parameters are
drawn in fp32 and then rounded to their dtype; fp64 ones are drawn in fp64.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from zorselike.errors import ConfigError
from zorselike.runtime.model.pruning import copy_tree, join

M = TypeVar("M", bound=nn.Module)
Callback = Callable[[nn.Module], object]

_INITIALISERS = ("init_weights", "reset_parameters", "_reset_parameters")
"""What a module may call the method that initialises it; the last is `nn.MultiheadAttention`'s."""


def initialize(
    model: M, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> M:
    """Materialises and initialises a whole model, in place, as any plan's ranks would their parts.

    See `initialize_unit`. Returns the model.
    """
    initialize_unit(model, "", seed=seed, device=device, dtype=dtype)
    return model


def initialize_unit(
    module: nn.Module,
    fqn: str,
    *,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    root: nn.Module | None = None,
    skips: bool = False,
) -> None:
    """Materialises and initialises the submodule `module` of a model, in place.

    `fqn` is its fully qualified name in the model, `""` for the model itself. `dtype` is that of its
    floating-point parameters, by default the one they have; buffers keep theirs. `root` is the model: with
    it, a unit inside a module that initialises itself as a whole gets the weights it would get there, and the
    `_init_weights(module)` of a Hugging Face model is used, module by module, instead of `init_weights`.

    With `skips` parameters on the meta device get memory and no values (NaN where there is one), for those
    who load theirs; buffers and adapters, which no file of a model has, are initialised.

    Parameters and buffers that are not on the meta device keep their values and are moved. Tensors
    used twice stay one tensor. The caller's random numbers are not touched.
    Raises `ConfigError` for a parameter or buffer that nothing initialises; with `skips`, only where it is an
    adapter, or no checkpoint has it.
    """
    if root is None and not fqn:
        root = module
    callback: Callback | None = getattr(root, "_init_weights", None)
    if root is not None and callback is not None:
        callback = _innermost_callback(root, fqn, callback)
    unit = _Unit(module, root=root, seed=seed, device=torch.device(device), dtype=dtype, skips=skips)
    if unit.has_pending(module):
        # The CPU context overrides a caller's `with torch.device("meta")`.
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            owner = _owner_above(root, fqn) if root is not None and callback is None else None
            if root is None or owner is None:
                unit.initialise(module, fqn, callback)
            else:
                whole = unit.initialise_copy(root.get_submodule(owner), owner)
                unit.take_values(module, whole.get_submodule(fqn.removeprefix(f"{owner}.")))
    unit.move_rest()


def unit_seed(seed: int, fqn: str) -> int:
    """The seed of a module's random numbers: 63 bits of SHA-256 over (seed, name)."""
    digest = hashlib.sha256(f"{seed}:{fqn}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class _Unit:
    """One unit on its way from the meta device to its own."""

    def __init__(
        self,
        module: nn.Module,
        *,
        root: nn.Module | None,
        seed: int,
        device: torch.device,
        dtype: torch.dtype | None,
        skips: bool,
    ) -> None:
        self._module = module
        self._scope = [module] if root is None else [module, root]
        self._seed = seed
        self._device = device
        self._dtype = dtype
        self._skips = skips
        self._pending = {id(t): (t, self._final_dtype(t)) for _, t in _named_tensors(module) if t.is_meta}
        """Tensors without values yet, held so that none gets the `id` of another, and their last dtypes."""

    def has_pending(self, module: nn.Module, *, recurse: bool = True) -> bool:
        """Whether `module` has tensors without values, or only itself, without its children."""
        return any(id(t) in self._pending for _, t in _named_tensors(module, recurse=recurse))

    def initialise(self, module: nn.Module, fqn: str, callback: Callback | None) -> None:
        """Initialises what is pending in `module`, each tensor by the outermost module that can."""
        if callback is not None:
            callback = _own_callback(module) or callback
        is_root = not fqn and any(True for _ in module.children())
        whole = self._whole_of(module, fqn) if callback is None else None
        if whole is not None and any(_plain_method(whole, name) for name in _INITIALISERS):
            return self.take_values(module, self.initialise_copy(whole, fqn))
        if hasattr(module, "reset_lora_parameters"):
            adapters = nn.ModuleList(c for name, c in module.named_children() if name.startswith("lora_"))
            if self.has_pending(adapters):
                self._draw(adapters, fqn, partial(_reset_adapters, module), recurse=True, skips=False)
        for method, is_for_all_below in _initialisers(module, callback):
            recurse = is_for_all_below and not is_root
            if self.has_pending(module, recurse=recurse):
                self._draw(module, fqn, method, recurse=not is_root, skips=self._skips)
        for name, child in module.named_children():
            if self.has_pending(child):
                self.initialise(child, join(fqn, name), callback)
        for name, tensor in list(_named_tensors(module, recurse=False)):
            if id(tensor) in self._pending:
                own = join(fqn, name)
                if not self._skips or name not in module.state_dict(keep_vars=True) or ".lora_" in f".{own}":
                    raise _nothing_initialises(module, own, tensor)
                blank = torch.empty_like(tensor, device="cpu")
                _mark_blank(blank)
                self._finish(tensor, blank)

    def _whole_of(self, module: nn.Module, fqn: str) -> nn.Module | None:
        """The model's own module where `module` is a copy that lacks what other ministages have of it."""
        if not fqn or len(self._scope) == 1:
            return None
        try:
            own = self._scope[-1].get_submodule(fqn)
        except AttributeError:  # A name of the caller's own making.
            return None
        return None if own is module or dict(own.named_children()) == dict(module.named_children()) else own

    def initialise_copy(self, module: nn.Module, fqn: str) -> nn.Module:
        """A copy of a module of the model, on the CPU and with values, whatever of it is sharded already."""
        whole = _copy_unsharded(module)
        initialize_unit(whole, fqn, seed=self._seed, device="cpu", dtype=self._dtype, skips=self._skips)
        return whole

    def take_values(self, module: nn.Module, other: nn.Module) -> None:
        """Takes the values of what is pending in a module from an initialised copy of it."""
        values = dict(_named_tensors(other))
        for name, tensor in list(_named_tensors(module)):
            if id(tensor) in self._pending:
                self._finish(tensor, values[name].detach())

    def move_rest(self) -> None:
        """Moves what had its values from the start, or was put in place of a buffer."""
        for _, tensor in _named_tensors(self._module):
            dtype = self._final_dtype(tensor)
            is_there = tensor.device.type == self._device.type and (
                self._device.index is None or tensor.device.index == self._device.index
            )
            if not is_there or tensor.dtype != dtype:
                tensor.data = tensor.data.to(self._device, dtype)

    def _draw(
        self, module: nn.Module, fqn: str, method: Callable[[], object], *, recurse: bool, skips: bool
    ) -> None:
        """Calls an initialiser with all that it may write to on the CPU; keeps what was pending."""
        lent: list[tuple[Tensor, Tensor]] = []
        for _, tensor in list(_named_tensors(module, recurse=recurse)):
            drawn_dtype = self._drawn_dtype(tensor)
            if id(tensor) not in self._pending:
                # Values that exist must neither change nor change which numbers the others draw.
                # Where nothing is drawn a parameter needs no memory to be written to.
                place = "meta" if self._skips and isinstance(tensor, nn.Parameter) else "cpu"
                stand_in = _like(tensor, tensor.detach().to(place, drawn_dtype, copy=True))
                lent.append(self._replace(tensor, stand_in))
            elif tensor.is_meta:
                blank = torch.empty_like(tensor, device="cpu", dtype=drawn_dtype)
                _mark_blank(blank)
                self._replace(tensor, _like(tensor, blank))
        torch.default_generator.manual_seed(unit_seed(self._seed, fqn))
        skipped = _Skipped(t for _, t in _named_tensors(module, recurse=recurse) if id(t) in self._pending)
        with skipped if skips else nullcontext():
            method()
        for stand_in, original in lent:
            self._replace(stand_in, original)
        for _, tensor in list(_named_tensors(module, recurse=recurse)):
            if id(tensor) in self._pending and (id(tensor) in skipped.written or not _is_blank(tensor)):
                self._finish(tensor, tensor.detach())

    def _finish(self, tensor: Tensor, values: Tensor) -> None:
        """Gives a pending tensor its values, on its device and in its dtype."""
        _, dtype = self._pending.pop(id(tensor))
        final = values.to(self._device, dtype)
        if tensor.is_meta or final is not values:
            self._replace(tensor, _like(tensor, final))

    def _replace(self, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Puts `new` where `old` was; returns what to replace with what to undo it."""
        try:
            # Keeps the object, so every place that uses it, of whatever unit, sees the new values.
            swap_tensors(old, new)  # type: ignore[no-untyped-call]
            return old, new
        except RuntimeError:  # weakly referenced, as an `nn.LSTM` does
            for owner in itertools.chain.from_iterable(top.modules() for top in self._scope):
                for key, value in [*owner._parameters.items(), *owner._buffers.items()]:
                    if value is old:
                        setattr(owner, key, new)
            if id(old) in self._pending:
                self._pending[id(new)] = new, self._pending.pop(id(old))[1]
            return new, old

    def _final_dtype(self, tensor: Tensor) -> torch.dtype:
        if self._dtype is None or not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            return tensor.dtype
        return self._dtype

    def _drawn_dtype(self, tensor: Tensor) -> torch.dtype:
        if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            return tensor.dtype
        _, final = self._pending.get(id(tensor)) or (tensor, self._final_dtype(tensor))
        return torch.float64 if final == torch.float64 else torch.float32


class _Skipped(TorchFunctionMode):
    """Inside, nothing is written in place to the parameters among `tensors`, however it comes to them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._owners = {t.untyped_storage().data_ptr(): t for t in tensors if isinstance(t, nn.Parameter)}
        self.written: set[int] = set()
        """Identities of parameters that would have been written to."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        target = args[0] if args else named.get("tensor")  # As `torch.nn.init` passes it on.
        if name.endswith("_") and not name.endswith("__") and isinstance(target, Tensor):
            owner = self._owners.get(target.untyped_storage().data_ptr())
            if owner is not None:
                self.written.add(id(owner))
                return target
        return func(*args, **named)


def _initialisers(
    module: nn.Module, callback: Callback | None
) -> Iterator[tuple[Callable[[], object], bool]]:
    """The ways to initialise a module, best first, and whether each is for all below it too."""
    if callback is not None:
        yield partial(callback, module), True
    for name in _INITIALISERS:
        method = _plain_method(module, name)
        # Every Hugging Face submodel has an `init_weights`; it is not meant for one of its layers.
        if method is not None and not (callback is not None and name == "init_weights"):
            yield method, callback is None
            break
    method = _plain_method(module, "init_buffers")
    if method is not None:
        yield method, True


def _innermost_callback(root: nn.Module, fqn: str, callback: Callback) -> Callback:
    """That of the submodel of a Hugging Face model in which a module is."""
    module: Any = root
    for name in filter(None, fqn.split(".")):
        module = getattr(module, name, None)
        callback = _own_callback(module) or callback
    return callback


def _own_callback(module: Any) -> Callback | None:
    """Of a submodel, which may know what the model around it does not (`hidden_size` of Gemma 3n)."""
    return getattr(module, "_init_weights", None) if hasattr(module, "base_model_prefix") else None


def _reset_adapters(module: Any) -> None:
    """Of a layer that `peft` has given some."""
    for name in module.r:  # Ranks by name.
        module.reset_lora_parameters(name, True)


def _owner_above(root: nn.Module, fqn: str) -> str | None:
    """The outermost module, the root left out, that initialises `fqn` as a part of itself."""
    path = fqn.split(".")
    module: nn.Module | None = root
    for depth, child in enumerate(path[:-1], start=1):
        module = getattr(module, child, None)
        if module is None:  # a name of the caller's own making: no module is above it
            return None
        if any(_plain_method(module, method) for method in _INITIALISERS):
            return ".".join(path[:depth])
    return None


def _copy_unsharded(module: nn.Module) -> nn.Module:
    """A copy, on the meta device where parameters are sharded: FSDP2's modules refuse `copy.deepcopy`."""
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return copy.deepcopy(module)
    whole = copy_tree(module)
    made: dict[int, Tensor | None] = {id(None): None}
    for owner in whole.modules():
        for store in (owner._parameters, owner._buffers):
            for name, tensor in store.items():
                if id(tensor) not in made and tensor is not None:
                    is_sharded = isinstance(tensor, DTensor)
                    place = "meta" if is_sharded or tensor.is_meta else "cpu"
                    blank = torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
                    made[id(tensor)] = nn.Parameter(blank) if is_sharded else _like(tensor, blank)
                store[name] = made[id(tensor)]  # type: ignore[assignment]
    return whole


def _plain_method(module: nn.Module, name: str) -> Callable[[], Any] | None:
    """A method that can be called without arguments, None if there is none."""
    method = getattr(module, name, None)
    if not inspect.ismethod(method):
        return None
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    needs_arguments = any(p.default is p.empty and p.kind not in optional for p in parameters)
    return None if needs_arguments else method


def _named_tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)


def _like(old: Tensor, values: Tensor) -> Tensor:
    """`values` as the same kind of thing as `old`: a parameter or buffer with its attributes."""
    is_parameter = isinstance(old, nn.Parameter)
    new = nn.Parameter(values, requires_grad=old.requires_grad) if is_parameter else values.detach()
    vars(new).update(vars(old))
    return new


def _mark_blank(tensor: Tensor) -> None:
    """Fills a tensor with what no initialiser writes."""
    if _holds_nan(tensor):
        tensor.fill_(torch.nan)
    else:
        tensor.view(_INTEGERS[tensor.itemsize]).fill_(_BLANK[tensor.itemsize])


def _is_blank(tensor: Tensor) -> bool:
    """Whether a marked tensor still has no values, or lacks some."""
    if tensor.numel() == 0:
        return False
    if _holds_nan(tensor):
        return bool(tensor.sum().isnan())
    return bool((tensor.view(_INTEGERS[tensor.itemsize]) == _BLANK[tensor.itemsize]).all())


def _holds_nan(tensor: Tensor) -> bool:
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLANK = {size: int.from_bytes(b"\2" * size, "little") for size in _INTEGERS}
"""Bytes of 2: not a bool, and no likely integer."""


def _nothing_initialises(module: nn.Module, fqn: str, tensor: Tensor) -> ConfigError:
    kind, method = (
        ("parameter", "reset_parameters()")
        if isinstance(tensor, nn.Parameter)
        else ("buffer", "init_buffers()")
    )
    return ConfigError(
        f"model: nothing initialises the {kind} '{fqn}', which is on the meta device: give "
        f"{type(module).__name__} a method {method} that writes it, or build the model on a real device"
    )
