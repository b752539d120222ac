"""What computing holds of a device's memory, what it may hold, and how it is given back.

A GPU's allocator counts and refuses by itself. A CPU rank's memory is the host's: what autograd saves is
counted as it is saved, beside what the caller says that it holds, so that the same searches run there and
end in `MemoryLimitError` before the machine ends them. What comes and goes inside one operation is not
seen on a CPU.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from zorselike.runtime.memory.host_room import find_host_room

HOST_SHARE = 0.9
"""Of the free host memory, what trials on a CPU may use."""

_REFUSALS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class MemoryLimitError(RuntimeError):
    """A CPU rank would hold more than it may: what a GPU's out-of-memory is there."""


class DeviceMemory(ABC):
    """Memory of the device that this process measures on."""

    limit_bytes: int
    """What this process may hold."""

    @abstractmethod
    def is_refusal(self, error: Exception) -> bool:
        """Whether an error says that the device would hold more than it can."""

    @abstractmethod
    @contextmanager
    def watching(self, module: nn.Module, held: Callable[[], int]) -> Iterator[None]:
        """Counts what is held inside. `module`: its parameters count as held, not as saved; `held`: bytes
        that the caller knows of, asked on a CPU."""
        yield

    @abstractmethod
    def note(self) -> None:
        """Takes what is held now for a peak, where nobody else would see it."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that was held inside the last `watching`."""

    @abstractmethod
    def kept_bytes(self) -> int:
        """What computing has left since the last `watching` began."""

    def context_bytes(self) -> int:
        """What is on the device now beside tensors."""
        return 0

    def restart_pools(self) -> None:
        """Gives back what no tensor has, and forgets how much that was."""
        self.release()

    def pools_bytes(self) -> int:
        """How much more the allocator has held since `restart_pools` than tensors asked for."""
        return 0

    def release(self) -> None:
        """Gives back what no one refers to any more; after a failure its traceback must be gone."""
        gc.collect()


class CudaMemory(DeviceMemory):
    """A GPU's, as torch's allocator counts it."""

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        """`limit_bytes`: as if the device had no more; the allocator holds to it."""
        self._device = device
        torch.cuda.init()  # type: ignore[no-untyped-call]
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        if limit_bytes is not None and limit_bytes < total:
            torch.cuda.set_per_process_memory_fraction(limit_bytes / total, device)
        self.limit_bytes = min(total if limit_bytes is None else limit_bytes, free + reserved)
        self._start = 0
        self.allocator_share = 0.0
        """Of the tensors' bytes, what the allocator had reserved on top at the last peak."""

    def is_refusal(self, error: Exception) -> bool:
        # Libraries beside the allocator have words of their own for it.
        return isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSALS)
        )

    def context_bytes(self) -> int:
        """What is on the device now beside torch's tensors: the CUDA context, libraries. What other processes
        hold there is in it: measure alone."""
        free, total = torch.cuda.mem_get_info(self._device)
        return max(0, total - free - torch.cuda.memory_reserved(self._device))

    def restart_pools(self) -> None:
        torch.cuda.synchronize(self._device)
        super().restart_pools()
        torch.cuda.reset_peak_memory_stats(self._device)

    def pools_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        return max(0, torch.cuda.max_memory_reserved(self._device) - peak)

    @contextmanager
    def watching(self, module: nn.Module, held: Callable[[], int]) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = torch.cuda.memory_allocated(self._device)
        yield
        torch.cuda.synchronize(self._device)
        peak, reserved = self.peak_bytes, torch.cuda.max_memory_reserved(self._device)
        self.allocator_share = max(0.0, reserved / peak - 1) if peak else 0.0

    def note(self) -> None:
        pass

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def kept_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._start

    def release(self) -> None:
        super().release()
        torch.cuda.empty_cache()


class HostMemory(DeviceMemory):
    """A CPU rank's: what the caller holds, and what autograd saves."""

    def __init__(self, limit_bytes: int | None = None, *, num_sharing: int = 1) -> None:
        """`num_sharing`: processes that share this host's free memory."""
        self._room = find_host_room()
        free = int(self._room.num_bytes * HOST_SHARE / num_sharing)
        self.limit_bytes = free if limit_bytes is None else min(free, limit_bytes)
        self._held: Callable[[], int] = lambda: 0
        self._peak = 0
        self._saved = _SavedBytes()

    def is_refusal(self, error: Exception) -> bool:
        return isinstance(error, MemoryLimitError | MemoryError) or "can't allocate memory" in str(error)

    @contextmanager
    def watching(self, module: nn.Module, held: Callable[[], int]) -> Iterator[None]:
        self._held, self._peak, self._saved = held, 0, _SavedBytes()
        owners = list_owners(module)

        def pack(tensor: Tensor) -> _Saved:
            storage = tensor.untyped_storage()
            counts = not _is_parameter(storage.data_ptr(), owners)
            # Itself it would be kept for good where an operation saves its own result and no backward comes.
            saved = _Saved(tensor.detach(), storage.data_ptr(), self._saved if counts else None)
            self.note()
            return saved

        try:
            with saved_tensors_hooks(pack, lambda saved: saved.tensor):
                yield
        finally:
            self._held = lambda: 0  # Or it would keep alive what the caller gives up.

    def note(self) -> None:
        now = self._held() + self.kept_bytes()
        self._peak = max(self._peak, now)
        if now > self.limit_bytes:
            raise MemoryLimitError(f"{now:,} bytes held, {self.limit_bytes:,} allowed; host: {self._room}")

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def kept_bytes(self) -> int:
        return self._saved.total


class _SavedBytes:
    """Bytes of the storages that autograd holds now, each counted once."""

    def __init__(self) -> None:
        self.total = 0
        self._uses: Counter[int] = Counter()

    def add(self, place: int, num_bytes: int) -> None:
        self._uses[place] += 1
        self.total += num_bytes if self._uses[place] == 1 else 0

    def remove(self, place: int, num_bytes: int) -> None:
        self._uses[place] -= 1
        self.total -= num_bytes if self._uses[place] == 0 else 0


class _Saved:
    """A tensor that autograd saves, counted until it is given up."""

    def __init__(self, tensor: Tensor, place: int, counted_in: _SavedBytes | None) -> None:
        self.tensor, self._place, self._counted_in = tensor, place, counted_in
        self._num_bytes = tensor.untyped_storage().nbytes()
        if counted_in is not None:
            counted_in.add(place, self._num_bytes)

    def __del__(self) -> None:
        if self._counted_in is not None:
            self._counted_in.remove(self._place, self._num_bytes)


def list_owners(module: nn.Module) -> list[nn.Module]:
    """Modules that have parameters of their own: these stay, while gathered parameters come and go. To walk
    all modules for each tensor that autograd saves took half of a trial's time."""
    return [own for own in module.modules() if any(True for _ in own.parameters(recurse=False))]


def parameters_of(owners: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Those that are registered now, each once."""
    own = (parameter for owner in owners for parameter in owner.parameters(recurse=False))
    yield from {id(parameter): parameter for parameter in own}.values()


def _is_parameter(place: int, owners: Iterable[nn.Module]) -> bool:
    """Whether memory is a parameter's, as registered now."""
    whole = (parameter for parameter in parameters_of(owners) if not isinstance(parameter, DTensor))
    return any(parameter.untyped_storage().data_ptr() == place for parameter in whole)
