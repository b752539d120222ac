"""What the host would wait for in a step on a GPU, found on a CPU rank.

A CPU rank's device is the host, so every storage is told apart by where it comes from: batches, slabs of
the host pool, and what the runtime makes without a device are the host's; all else is the device's. Two
modes then see every call of torch and every operator: a copy from one to the other that the host waits for
(it is blocking, or the host's memory is pageable), a value of the device that Python reads, an operator
whose result's shape depends on values. Events, futures and works of collectives are seen too.

Device memory has `torch.device("cpu", 0)`, host memory `torch.device("cpu")`, as `tensor.device` says inside.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from operator_roles import Role, role_of, tensors_in
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from zorselike.runtime import batch
from zorselike.runtime.memory.memory import HostPool
from zorselike.runtime.memory.streams import Event, Stream, Streams

DEVICE = torch.device("cpu", 0)
"""The device, as a pipeline is to be given it."""
HOST = torch.device("cpu")
_ROOT = str(Path(torch.__file__).parent)
_OURS = str(Path(batch.__file__).parent)
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.rand, torch.randn}
_FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.scalar_tensor}
_TO_PYTHON = {Tensor.tolist, Tensor.numpy}
_OF_VALUES = (
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "equal",
    "bincount",
)
"""Operators whose result, or its shape, is known only when they have run."""


class HostWaits:
    """Finds waits while `watching`, by their place: file, function and what is waited for."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        """In the thread of the step."""
        self.in_threads: set[str] = set()
        """In others, which wait for it."""
        self.num_transfers = 0
        """Copies between host and device, to see that a test gets there."""
        self._host: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.streams = LoggedStreams(self)

    # -- where storages are ----------------------------------------------------------------

    def mark(self, tensor: Tensor, *, host: bool, pinned: bool = False) -> Tensor:
        """Says where a tensor's storage is."""
        storage = tensor.untyped_storage()
        for known, holds in ((self._host, host), (self._pinned, pinned)):
            known.pop(storage._cdata, None)
            if holds:
                known[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def is_host(self, tensor: Tensor) -> bool:
        return self._is_in(self._host, tensor)

    def _is_in(self, known: dict[int, StorageWeakRef], tensor: Tensor) -> bool:
        address = tensor.untyped_storage()._cdata
        return address in known and not known[address].expired()

    # -- findings --------------------------------------------------------------------------

    def note(self, what: str) -> None:
        """The host waits now."""
        main = threading.current_thread() is threading.main_thread()
        (self.found if main else self.in_threads).add(f"{_place()}: {what}")

    def transfer(self, target: Tensor, source: Tensor, *, non_blocking: bool, target_is_host: bool) -> None:
        self.num_transfers += 1
        on_host = target if target_is_host else source
        if not non_blocking:
            self.note("blocking copy")
        elif not self._is_in(self._pinned, on_host):
            self.note("copy of pageable memory")

    @contextmanager
    def making(self) -> Iterator[None]:
        """Pipelines are made inside: what they put on the host is known, and their streams are logged."""
        allocate = HostPool._allocate

        def allocate_on_host(pool: HostPool, *args: Any) -> Tensor:
            return self.mark(allocate(pool, *args), host=True, pinned=True)

        with (
            mock.patch("zorselike.runtime.ministage.settings.make_streams", lambda device: self.streams),
            mock.patch.object(HostPool, "_allocate", allocate_on_host),
        ):
            yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A step runs inside."""

        def to_device(tensor: Tensor, device: torch.device) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)  # As for a GPU.

        with (
            mock.patch.object(batch, "copy_to_device", to_device),
            mock.patch.object(dist.Work, "wait", self._noting(dist.Work.wait, "work of a collective")),
            mock.patch.object(Future, "result", self._noting(Future.result, "thread")),
            _Calls(self),
            _Operators(self),
        ):
            yield

    def _noting(self, wait: Callable[..., Any], what: str) -> Callable[..., Any]:
        def wait_and_note(*args: Any, **kwargs: Any) -> Any:
            if _frame() is not None:  # FSDP2's own collectives are of the device.
                self.note(what)
            return wait(*args, **kwargs)

        return wait_and_note


class LoggedEvent(Event):
    def __init__(self, waits: HostWaits) -> None:
        self._waits = waits

    def synchronize(self) -> None:
        self._waits.note("event")


class LoggedStream(Stream):
    def __init__(self, waits: HostWaits) -> None:
        self._waits = waits

    def record(self) -> Event:
        return LoggedEvent(self._waits)


class LoggedStreams(Streams):
    """Concurrent streams, as far as the runtime can tell."""

    is_concurrent = True

    def __init__(self, waits: HostWaits) -> None:
        self._waits = waits
        for name, kind in Streams.__annotations__.items():
            if kind == "Stream":
                setattr(self, name, LoggedStream(waits))

    def make(self, name: str) -> Stream:
        return LoggedStream(self._waits)


class _Calls(TorchFunctionMode):
    """What Python calls: factories, moves, and reads that no operator shows."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        waits = self._waits
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            device = func(*args)
            is_plain = device.type == "cpu" and type(args[0]) in (Tensor, torch.nn.Parameter)
            if not is_plain or _caller().co_filename == checkpoint.__file__:  # Which compares devices.
                return device
            return HOST if waits.is_host(args[0]) else DEVICE
        if func is Tensor.pin_memory:
            return waits.mark(args[0].clone(), host=True, pinned=True)
        if func in (Tensor.to, Tensor.cpu):
            return self._move(func, args, kwargs)
        if func in _FACTORIES | _FROM_PYTHON and _is_cpu(kwargs.get("device")):
            made = func(*args, **kwargs)
            on_device = kwargs.get("device") == DEVICE or not _caller().co_filename.startswith(_OURS)
            if on_device and func in _FROM_PYTHON:
                waits.note("value of Python's to the device")
            return waits.mark(made, host=not on_device, pinned=_caller().co_name == "make_host_buffer")
        if (func is Tensor.new_tensor or func in _TO_PYTHON) and not waits.is_host(args[0]):
            waits.note(func.__name__)
        return func(*args, **kwargs)

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        given = [*args[1:], kwargs.get("device")]
        targets = [torch.device(each) for each in given if isinstance(each, (str, torch.device))]
        if func is Tensor.cpu:
            targets = [HOST]
        if type(tensor) is not Tensor or not targets or targets[0].type != "cpu":
            return func(*args, **kwargs)
        to_host = targets[0] != DEVICE
        if to_host is self._waits.is_host(tensor):
            return func(*args, **kwargs)
        moved = tensor.clone()
        non_blocking = kwargs.get("non_blocking", False)
        self._waits.transfer(moved, tensor, non_blocking=non_blocking, target_is_host=to_host)
        return self._waits.mark(moved, host=to_host)


class _Operators(TorchDispatchMode):
    """What runs: results are where their arguments are."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # It comes back as operators on local tensors.
        if not all(kind in (Tensor, torch.nn.Parameter) for kind in types):
            return func(*args, **kwargs)
        waits, name = self._waits, func.overloadpacket.__name__
        read = tensors_in([args, kwargs])
        on_host = {id(tensor): waits.is_host(tensor) for tensor in read}
        if name == "copy_" and len(read) == 2 and on_host[id(read[0])] is not on_host[id(read[1])]:
            non_blocking = bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False)
            waits.transfer(*read, non_blocking=non_blocking, target_is_host=on_host[id(read[0])])
        elif name != "set_" and {on_host[id(tensor)] for tensor in read if tensor.dim()} == {True, False}:
            waits.note(f"{name} of host and device")
        is_masked = name in ("index", "index_put_") and any(tensor.dtype is torch.bool for tensor in read[1:])
        if (name in _OF_VALUES or is_masked) and not on_host[id(read[0])]:
            waits.note(name)
        storages = {tensor.untyped_storage()._cdata for tensor in read}
        result = func(*args, **kwargs)
        if role_of(func) is not Role.COLLECTIVE and name != "set_":
            for made in tensors_in(result):
                if made.untyped_storage()._cdata not in storages:
                    waits.mark(made, host=bool(read) and all(on_host.values()))
        return result


def _is_cpu(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"


def _frame() -> Any:
    """The innermost of the runtime, unless FSDP2 or autograd were called by that since."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS):
            return frame
        if name.startswith(_ROOT) and "/fsdp/" in name:
            return None
        frame = frame.f_back
    return None


def _caller() -> CodeType:
    """The innermost function outside of this file."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    code: CodeType = frame.f_code
    return code


def _place() -> str:
    frame = _frame()
    if frame is None:
        return "outside of the runtime"
    file = Path(frame.f_code.co_filename).relative_to(_OURS)
    return f"{file}: {frame.f_code.co_qualname}"
