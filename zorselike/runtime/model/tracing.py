"""What a model does, found out without its memory: copies on fake tensors, and a recorder.

Fake tensors have shapes, dtypes, autograd flags and a device type, but no contents
(docs: `torch.compiler_fake_tensor`). Meta tensors would do, were it not for models that ask for
the device's type: `torch.autocast(x.device.type)` refuses "meta".
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zorselike
from zorselike.errors import ConfigError
from zorselike.runtime._compat import (
    FAKE_TENSOR_LOG,
    TorchDispatchMode,
    grouped_products,
    make_fake_tensor_mode,
    version_of,
)
from zorselike.runtime.model.nested import map_leaves, tensors_in
from zorselike.runtime.model.signature import KwargSpecs, Signature
from zorselike.text.wording import first_line


class FakeMode:
    """While it is entered, tensors are made without memory; `from_tensor(t)` is for those that exist."""

    def __init__(self, mode: Any) -> None:
        """`mode`: torch's own."""
        self._modes = (mode, _GroupedProducts())
        self.from_tensor: Callable[[Tensor], Tensor] = mode.from_tensor

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*raised)


class Guesses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, who asks for the value of a fake tensor gets this one, or 1 where a number is asked for. Each
    operation passes through it: for runs that need it."""

    def __init__(self, value: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, torch.SymInt | torch.SymFloat | torch.SymBool):
            return found
        dtype = args[0].dtype if args and isinstance(args[0], Tensor) else torch.int64
        return self._value if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


class _GroupedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of fake tensors torch has the products of experts for bfloat16 alone, of real ones for others too: here
    they are all there. Below autograd, so that what is kept for a backward is as it was."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in grouped_products() or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        halved = [own.bfloat16() for own in args[:2]]
        return func(*halved, *args[2:], **(kwargs or {})).to(args[0].dtype)


def make_fake_mode() -> FakeMode:
    """A mode of its own."""
    return FakeMode(make_fake_tensor_mode())


def fake_copies(
    modules: Sequence[nn.Module],
    mode: FakeMode,
    *,
    param_dtype: torch.dtype | None = None,
    all_trainable: bool = False,
) -> list[nn.Module]:
    """Copies of modules whose tensors are all fake; what they share, their copies share too.

    `param_dtype`: of the copies' floating-point parameters. `all_trainable`: every floating-point parameter
    of the copies requires a gradient. Raises `ConfigError` for a module that cannot be copied.
    """
    memo: dict[int, Any] = {}
    kept: list[Tensor] = []  # ids stay unique only while their objects live

    with mode:
        for tensor in chain.from_iterable(map(_all_tensors, modules)):
            if id(tensor) not in memo:
                kept.append(tensor)
                memo[id(tensor)] = _fake(tensor, param_dtype=param_dtype, all_trainable=all_trainable)

    def make(shared: Mapping[int, Any]) -> list[nn.Module]:
        own = {**memo, **shared}
        return [copy.deepcopy(module, own) for module in modules]

    try:
        try:
            return make({})
        except Exception:
            # A hook may hold what cannot be copied, as an open file: it sees fake tensors then.
            return make({id(hook): hook for hook in _hooks_of_others(modules)})
    except Exception as error:
        raise ConfigError(
            f"model: a copy of {type(modules[0]).__name__} to find shapes with cannot be made "
            f"({first_line(error)}); let its attributes be copyable by copy.deepcopy"
        ) from error


def _hooks_of_others(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Hooks that are methods of no module, whose copy would have to be that of the module's copy."""
    for owner in chain.from_iterable(module.modules() for module in modules):
        for hook in (*owner._forward_hooks.values(), *owner._forward_pre_hooks.values()):
            if not isinstance(getattr(hook, "__self__", hook), nn.Module):
                yield hook


def _all_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that modules hold as plain attributes."""
    for owner in module.modules():
        for value in vars(owner).values():
            yield from tensors_in(value)


def _fake(tensor: Tensor, *, param_dtype: torch.dtype | None, all_trainable: bool) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    dtype = tensor.dtype
    if is_parameter and param_dtype is not None and tensor.is_floating_point():
        dtype = param_dtype
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
    if is_parameter:
        trainable = tensor.requires_grad or (all_trainable and tensor.is_floating_point())
        fake = nn.Parameter(fake, requires_grad=trainable)
    return fake


_LruCache = type(lru_cache(len))


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Inside, what `functools.lru_cache` keeps in the files of a model's classes is forgotten, and behind it
    what it kept inside: tensors of before are not fake, and those of inside are."""
    caches = list(_find_caches(model))
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


def _find_caches(model: nn.Module) -> Iterator[Any]:
    """Of functions and methods, within other decorators too."""
    files = {type(module).__module__ for module in model.modules()}
    names = [name for name in files if name in sys.modules and not name.startswith("torch.")]
    for value in chain.from_iterable([*vars(sys.modules[name]).values()] for name in names):
        for entry in (value, *(vars(value).values() if isinstance(value, type) else ())):
            function = entry.__func__ if isinstance(entry, staticmethod | classmethod) else entry
            closure = (function.__closure__ or ()) if inspect.isfunction(function) else ()
            for found in (function, *_contents(closure)):
                if isinstance(found, _LruCache):
                    yield found


def _contents(closure: Sequence[Any]) -> Iterator[Any]:
    for cell in closure:
        with suppress(ValueError):  # It is empty.
            yield cell.cell_contents


_OF_ANOTHER_DEVICE = (
    "found two different devices",
    "all tensors to be on the same device",
    "support for cuda devices",
    "not compiled with CUDA",
    "NVIDIA driver",
)
"""What torch says where a forward puts tensors on a device by its name: all of them are the host's here."""


def find_place(error: BaseException) -> str:
    """Where in a model's own code an error arose, as ` (model.py:12)`, empty where in none; and the mend, if
    it is known."""
    frames = traceback.extract_tb(error.__traceback__)
    others = (*torch.__path__, *zorselike.__path__, "<")
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    if any(words in str(error) for words in _OF_ANOTHER_DEVICE):
        place += "; in a forward make tensors where its inputs are, as by device=x.device, and not on 'cuda'"
    return place


def lacks_member(error: BaseException) -> bool:
    """Whether who raised it asked a list or dictionary of modules for one that it has not."""
    if isinstance(error, AttributeError):
        return str(error).startswith(("'ModuleDict' object", "'ModuleList' object"))
    frames = traceback.extract_tb(error.__traceback__)
    asked = frames[-1].filename == inspect.getfile(nn.ModuleDict)
    return asked and isinstance(error, KeyError | IndexError)


class Skeleton:
    """Copies on fake tensors of a model and its ministages, made before anything is sharded."""

    def __init__(self) -> None:
        self.mode = make_fake_mode()
        self.whole: nn.Module = nn.Module()
        self.parts: list[nn.Module] = []
        self.sample: nn.Module | None = None
        """A copy of the model in which a layer of each class computes, where in `parts` none does."""
        self.takes_any_shape = True
        """Whether ministages compute inputs of any shape."""
        self.note = ""
        """What whoever trains such a model should know."""

    @property
    def probe_rows(self) -> tuple[int, int]:
        """Two row counts to run the copies with; what differs between the outputs is rows."""
        return 2, 3

    def make_copies(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Copies the model and the modules of its ministages."""
        self.whole, *self.parts = fake_copies([model, *modules], self.mode)

    def bind(self, inputs: Signature, kwargs: KwargSpecs, param_dtype: torch.dtype | None) -> None:
        """Prepares for, and checks, a model's true inputs; called before the copies run."""


# -- what runs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitCall:
    """One call of a named module, and what it was given: shapes and dtypes for tensors."""

    name: str
    arguments: str
    input_bytes: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """`(identity, bytes)` of each tensor that it was given."""
    carries_grad: bool = field(default=True, compare=False)
    """Whether one of them carries a gradient."""


class BufferWatch:
    """Sees whether a module changes buffers: any in place, or those of its state by putting in others."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (owner, key, buffer, version_of(buffer))
            for owner in module.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def has_changed(self) -> bool:
        return any(
            version_of(buffer) != version
            or (owner._buffers.get(key) is not buffer and key not in owner._non_persistent_buffers_set)
            for owner, key, buffer, version in self._found
        )


class Recorder(TorchFunctionMode):
    """Records, while it is entered, how modules are called and what is computed outside them."""

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[UnitCall] = []
        self._given: list[Tensor] = []
        """All tensors that units were given, alive so that no identity is used twice."""
        self.outside: Counter[str] = Counter()
        """Operations outside all units whose result carries a gradient, by name."""
        self.strays: dict[str, str] = {}
        """Units of which a parameter was used outside their own forward, and which parameter."""
        self.overwritten: list[str] = []
        """Units with trainable parameters that changed in place what they were given, where that carries a
        gradient."""
        self.changing: set[str] = set()
        """All units that changed something in place that they were given, or buffers: a second call would
        change it again."""
        self._buffers: BufferWatch | None = None
        """Of the unit that runs."""
        self._versions: list[tuple[Tensor, int]] = []
        """Of what the unit that runs was given."""
        self._active: list[str] = []
        # A tied parameter has several owners: each has its own once units are sharded.
        self._owners: dict[int, dict[str, str]] = {}
        for unit, module in units.items():
            for name, p in module.named_parameters():
                self._owners.setdefault(id(p), {})[unit] = f"{unit}.{name}"
        self._units = units

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Records what runs inside."""
        hooks = []
        for name, module in self._units.items():
            hooks.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(self._leave))
        own_thread = threading.get_ident()

        def is_elsewhere(_: logging.LogRecord) -> bool:
            return threading.get_ident() != own_thread

        # What fails is reported by the error; torch would log it to the screen besides. Nothing else is
        # silenced: elastic jobs trace while they train.
        FAKE_TENSOR_LOG.addFilter(is_elsewhere)
        try:
            with self:
                yield self
        finally:
            FAKE_TENSOR_LOG.removeFilter(is_elsewhere)
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._active:
                self._buffers = BufferWatch(module)
                tensors = tensors_in((args, kwargs))
                self._given += tensors
                given = tuple((id(tensor), tensor.nbytes) for tensor in tensors)
                arguments = f"{_describe(args)} {_describe(kwargs)}"
                carries_grad = any(tensor.requires_grad for tensor in tensors)
                self.calls.append(UnitCall(name, arguments, given, carries_grad))
                self._versions = [(tensor, version_of(tensor)) for tensor in tensors]
            self._active.append(name)

        return enter

    def _leave(self, module: nn.Module, *_: Any) -> None:
        name = self._active.pop()
        changed = [t for t, version in self._versions if version_of(t) != version] if not self._active else []
        if changed or (not self._active and self._buffers is not None and self._buffers.has_changed()):
            self.changing.add(name)
        if any(t.requires_grad for t in changed) and any(p.requires_grad for p in module.parameters()):
            self.overwritten.append(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Who asks for a dtype or a shape gets no values.
        is_read = tensors_in(result) or getattr(func, "__name__", "") == "__setitem__"
        for tensor in tensors_in((args, kwargs)) if is_read else ():
            owners = self._owners.get(id(tensor))
            if owners and not any(unit in owners for unit in self._active):
                unit, name = next(iter(owners.items()))
                self.strays.setdefault(unit, name)
        if not self._active and any(t.requires_grad for t in tensors_in(result)):
            self.outside[getattr(func, "__name__", str(func))] += 1
        return result


def _describe(value: Any) -> str:
    """An argument as far as two runs of the same model must agree in it."""

    def leaf(entry: Any) -> Any:
        if isinstance(entry, Tensor):
            return f"{entry.dtype}{list(entry.shape)}"
        return repr(entry) if isinstance(entry, str | int | float | bool | None) else type(entry).__name__

    return str(map_leaves(value, leaf))
