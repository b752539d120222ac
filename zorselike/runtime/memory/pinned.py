"""Host memory that a GPU copies from and to by itself: whole pages that the driver has locked.

The driver would fault in page by page in one thread; so the pages, huge ones where the kernel has
some, are touched by several threads before. A process forked later, such as a data worker, gets none of them,
neither to copy nor to hold: it must not touch what was offloaded.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zorselike.errors import ConfigError
from zorselike.runtime.memory.streams import Event, Stream
from zorselike.text.units import GIB

_HUGE_PAGE_BYTES = 2**21
_CHUNK_BYTES = 2**26
"""Touched by one thread at a time."""
_MAX_THREADS = 16


def make_pinned(purpose: str, num_bytes: int) -> Tensor:
    """Bytes `uint8 [num_bytes]`, rounded up to whole pages; end with `unpin`. Raises `ConfigError` if the
    driver does not lock so many."""
    num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    alignment = _HUGE_PAGE_BYTES if num_bytes >= _HUGE_PAGE_BYTES else mmap.PAGESIZE
    slab = torch.empty(num_bytes + alignment, dtype=torch.uint8, device="cpu")
    first = -slab.data_ptr() % alignment
    slab = slab[first : first + num_bytes]
    _advise(slab, "MADV_HUGEPAGE")
    _touch_pages(slab)
    _advise(slab, "MADV_DONTFORK")
    code = int(_cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0))
    if code:
        _advise(slab, "MADV_DOFORK")
        # Who goes on without would hear of it from the next kernel that it starts.
        with suppress(RuntimeError):
            _start_kernel()
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"
        raise ConfigError(
            f"the driver does not lock {slab.numel() / GIB:.2f} GiB of host memory for {purpose} "
            f"(CUDA error {code}; locked-memory limit: {allowed}): raise it with 'ulimit -l unlimited', "
            "or the container's memlock, or offload less"
        )
    return slab


def make_host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory for what comes from `device` or goes there, from torch's own pool of pinned memory. It may
    be dropped as soon as the copy is started."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda", device="cpu")


def copy_to_host(tensor: Tensor, stream: Stream) -> tuple[Tensor, Event]:
    """A copy on the host, and the event of its end on `stream`, which is the current one."""
    host = make_host_buffer(tensor.shape, tensor.dtype, tensor.device)
    host.copy_(tensor, non_blocking=True)
    return host, stream.record()


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, which this thread does not wait for: from pageable memory it would."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        # Not `pin_memory`, which refuses rows that share memory, as those of `expand` do.
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def unpin(slabs: Iterable[Tensor]) -> None:
    """Makes them memory like any other, which may be freed; nothing copies from or to them any more."""
    for slab in slabs:
        _cudart().cudaHostUnregister(slab.data_ptr())
        _advise(slab, "MADV_DOFORK")  # The allocator gives these pages to others.


def unpin_abandoned(slabs: list[Tensor], process: int, device: int) -> None:
    """`unpin` for whoever made them in `process` and went without doing it; a fork of that leaves them. From
    any thread, which without `device` would open a context on the first card."""
    if slabs and os.getpid() == process:
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            unpin(slabs)


def _touch_pages(slab: Tensor) -> None:
    chunks = [slab[start : start + _CHUNK_BYTES] for start in range(0, slab.numel(), _CHUNK_BYTES)]
    num_threads = min(len(chunks), os.cpu_count() or 1, _MAX_THREADS)
    with ThreadPoolExecutor(num_threads, "zorselike-pages") as threads:
        list(threads.map(lambda chunk: chunk[:: mmap.PAGESIZE].zero_(), chunks))


def _advise(slab: Tensor, name: str) -> None:
    """Tells the kernel about whole pages, if it knows what is meant."""
    with suppress(AttributeError):
        advice: int = getattr(mmap, name)
        address, num_bytes = ctypes.c_void_p(slab.data_ptr()), ctypes.c_size_t(slab.numel())
        ctypes.CDLL(None).madvise(address, num_bytes, advice)


def _start_kernel() -> None:
    torch.ones((), device="cuda")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
