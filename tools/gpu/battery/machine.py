"""What machine this is: versions, memory before and after touching CUDA, pinning, links, and forking."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from zorselike.cost.profile import Source
from zorselike.cost.purposes import Purpose
from zorselike.profiler.machine.host_link_timing import measure_host_link
from zorselike.runtime.memory.host_room import find_host_room
from zorselike.runtime.memory.memory import HostPool, Ledger

from ...report import num_cores
from .part import Record
from .training import device_of


def run_machine(record: Record) -> None:
    """Versions, the device, and what touching it takes."""
    record.put(
        "torch", {"version": torch.__version__, "cuda": torch.version.cuda, "debug": torch.version.debug}
    )
    record.say(f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}")
    driver = Path("/proc/driver/nvidia/version")
    record.say(f"driver: {driver.read_text().splitlines()[0] if driver.exists() else 'not named in /proc'}")
    for name in ("meminfo", "self/limits"):
        wanted = ("MemTotal", "MemAvailable", "HugePages_Total", "Hugepagesize", "Max locked memory")
        lines = Path(f"/proc/{name}").read_text().splitlines() if Path("/proc").exists() else []
        record.say("\n".join(line for line in lines if line.startswith(wanted)))
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    record.say(f"huge pages: {huge.read_text().strip() if huge.exists() else 'not told'}")
    record.say(f"host memory that offloading would believe in: {find_host_room()}; {num_cores()} cores")
    before = _host_memory()
    if record.settings.device == "cuda":
        _touch_cuda(record)
    after = _host_memory()
    record.put("host_memory", {"before": before, "after": after})
    record.say(f"this process before and after, MiB: {before} and {after}")


def _touch_cuda(record: Record) -> None:
    device = device_of("cuda")
    own = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    record.say(f"{own}; {total / 2**30:.2f} GiB, {(total - free) / 2**20:.0f} MiB of them taken by a context")
    torch.ones(1024, 1024, device=device) @ torch.ones(1024, 1024, device=device)
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    record.say(f"a first product takes {(free - after - reserved) / 2**20:.0f} MiB beside torch's memory")
    record.put(
        "device",
        {
            "name": own.name,
            "num_devices": torch.cuda.device_count(),
            "total_bytes": total,
            "context_bytes": total - free,
            "libraries_bytes": free - after - reserved,
            "capability": list(torch.cuda.get_device_capability(device)),
            "architectures": torch.cuda.get_arch_list(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
            "bf16": torch.cuda.is_bf16_supported(),
        },
    )


def _host_memory() -> dict[str, int]:
    """MiB of this process, and of what the machine has left."""
    return _read_mib("/proc/self/status", ("VmSize", "VmRSS", "VmPTE")) | _read_mib(
        "/proc/meminfo", ("MemAvailable",)
    )


def _read_mib(path: str, names: tuple[str, ...]) -> dict[str, int]:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    pairs = (line.split(":") for line in lines if line.startswith(names))
    return {name: int(rest.split()[0]) // 1024 for name, rest in pairs}


# -- pinning --------------------------------------------------------------------------------


def run_pinning(record: Record) -> None:
    """How fast host memory is registered with the driver, by how its pages came to be."""
    is_cuda = record.settings.device == "cuda"
    num_bytes = min(2**33, find_host_room().num_bytes // 8) // 2**21 * 2**21 if is_cuda else 2**26
    if is_cuda:
        device_of("cuda")
        torch.cuda.init()  # type: ignore[no-untyped-call]
    else:
        record.say("no device: only the touching of pages is timed")

    def register(*, huge: bool = False, threads: int = 0) -> Callable[[], object]:
        return lambda: _release(_make_slab(num_bytes, is_cuda=is_cuda, huge=huge, threads=threads))

    cores = num_cores()
    ways: dict[str, Callable[[], object]] = {
        "plain pages, faulted in by the driver": register(threads=not is_cuda),
        "huge pages, faulted in by the driver": register(huge=True, threads=not is_cuda),
        "plain pages, touched by one thread": register(threads=1),
        "plain pages, touched by all cores": register(threads=cores),
        "huge pages, touched by all cores": register(huge=True, threads=cores),
        "as the runtime makes it": lambda: _reserve(num_bytes, is_cuda=is_cuda),
    }
    if is_cuda:
        ways["torch's pin_memory"] = lambda: torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    rates = {}
    for name, way in ways.items():
        begin_s = time.perf_counter()
        way()
        rates[name] = num_bytes / 2**30 / (time.perf_counter() - begin_s)
        record.say(f"{rates[name]:8.2f} GiB/s  {name}")
        record.put("gib_per_s", rates)


def _reserve(num_bytes: int, *, is_cuda: bool) -> None:
    pool = HostPool(Ledger(), pin=is_cuda)
    pool.reserve(Purpose.OPTIMIZER_STATE, [num_bytes])
    pool.close()


def _make_slab(num_bytes: int, *, is_cuda: bool, huge: bool = False, threads: int = 0) -> torch.Tensor:
    """Host memory, its pages touched by so many threads and then registered."""
    slab = torch.empty(num_bytes + 2**21, dtype=torch.uint8)
    first = -slab.data_ptr() % 2**21
    slab = slab[first : first + num_bytes]
    _advise(slab, mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    if threads:
        chunks = slab.split(-(-num_bytes // threads // mmap.PAGESIZE) * mmap.PAGESIZE)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda chunk: chunk[:: mmap.PAGESIZE].zero_(), chunks))
    if is_cuda:
        code = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), num_bytes, 0))  # type: ignore[no-untyped-call]
        assert code == 0, f"cudaHostRegister says {code}"
    return slab


def _release(slab: torch.Tensor) -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())  # type: ignore[no-untyped-call]


def _advise(slab: torch.Tensor, advice: int) -> None:
    place, length = ctypes.c_void_p(slab.data_ptr()), ctypes.c_size_t(slab.numel())
    ctypes.CDLL(None).madvise(place, length, advice)


# -- links and forks ------------------------------------------------------------------------


def run_links(record: Record) -> None:
    """Copies each way and both at once, and what a fork takes once much is pinned."""
    device, is_cuda = device_of(record.settings.device), record.settings.device == "cuda"
    rates = measure_host_link(device, type="this", repeats=5, source=Source("measured"))
    record.put("host_link", rates)
    gib = [rate / 2**30 for rate in (rates.to_device, rates.to_host, rates.both)]
    record.say(f"GiB/s to the device {gib[0]:.1f}, to the host {gib[1]:.1f}, both at once {gib[2]:.1f}")
    num_bytes = min(2**34, find_host_room().num_bytes // 6 // 2**21 * 2**21) if is_cuda else 2**26
    for name, advice in (("pinned", mmap.MADV_DOFORK), ("pinned and left out of forks", mmap.MADV_DONTFORK)):
        slab = _make_slab(num_bytes, is_cuda=is_cuda, threads=num_cores())
        _advise(slab, advice)
        seconds, tables_mib = _time_fork()
        _advise(slab, mmap.MADV_DOFORK)
        _release(slab)
        record.put(name, {"fork_s": seconds, "page_tables_mib": tables_mib})
        record.say(
            f"fork with {num_bytes / 2**30:.2f} GiB {name}: {seconds * 1e3:.1f} ms, the child's page tables "
            f"{tables_mib} MiB"
        )


def _time_fork() -> tuple[float, int]:
    """Seconds until fork returned in the parent, and MiB of the child's page tables."""
    reading, writing = os.pipe()
    begin_s = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.write(writing, str(_read_mib("/proc/self/status", ("VmPTE",)).get("VmPTE", 0)).encode())
        os._exit(0)
    seconds = time.perf_counter() - begin_s
    told = os.read(reading, 64)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    return seconds, int(told or 0)
