"""What machine this is: versions, memory before and after touching CUDA, pinning, links, and forking."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
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

_MADV_POPULATE_WRITE = 23
"""Linux 5.14: faults pages in at once."""
_MADV_DONTFORK = 10
_SAMPLE_BYTES = 2**20


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
    num_bytes = min(2**33, find_host_room().num_bytes // 8) if is_cuda else 2**26
    num_bytes -= num_bytes % 2**21
    if is_cuda:
        device_of("cuda")
        torch.cuda.init()  # type: ignore[no-untyped-call]
    else:
        record.say("no device: only the faulting of pages is timed")
    ways: dict[str, Callable[[], None]] = {
        "plain pages": lambda: _register_mapped(num_bytes, is_cuda=is_cuda),
        "huge pages": lambda: _register_mapped(num_bytes, is_cuda=is_cuda, huge=True),
        "plain pages, pre-faulted by one thread": lambda: _register_mapped(
            num_bytes, is_cuda=is_cuda, threads=1
        ),
        "plain pages, pre-faulted by all cores": lambda: _register_mapped(
            num_bytes, is_cuda=is_cuda, threads=num_cores()
        ),
        "huge pages, pre-faulted by all cores": lambda: _register_mapped(
            num_bytes, is_cuda=is_cuda, huge=True, threads=num_cores()
        ),
        "our slab": lambda: _reserve_slab(num_bytes, is_cuda=is_cuda),
    }
    if is_cuda:
        ways["torch's pin_memory"] = lambda: _discard(
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        )
    rates = {}
    for name, way in ways.items():
        begin_s = time.perf_counter()
        way()
        rates[name] = num_bytes / 2**30 / (time.perf_counter() - begin_s)
        record.say(f"{rates[name]:8.2f} GiB/s  {name}")
        record.put("gib_per_s", rates)


def _discard(_: object) -> None:
    """Nobody needs it."""


def _reserve_slab(num_bytes: int, *, is_cuda: bool) -> None:
    pool = HostPool(Ledger(), pin=is_cuda)
    pool.reserve(Purpose.OPTIMIZER_STATE, [num_bytes])
    pool.close()


def _register_mapped(num_bytes: int, *, is_cuda: bool, huge: bool = False, threads: int = 0) -> None:
    memory = _Mapped(num_bytes, huge=huge)
    memory.fault(max(threads, 0 if is_cuda else 1))
    if is_cuda:
        memory.register()
        memory.unregister()
    memory.close()


class _Mapped:
    """Anonymous memory, registered as it is."""

    def __init__(self, num_bytes: int, *, huge: bool = False) -> None:
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.num_bytes = num_bytes
        holder = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(holder)
        del holder

    def fault(self, threads: int) -> None:
        """Makes the pages be there, by so many threads."""
        if not threads:
            return
        # The call holds no lock of the interpreter's, unlike a method of the map.
        advise = ctypes.CDLL(None, use_errno=True).madvise
        size = self.num_bytes // threads // mmap.PAGESIZE * mmap.PAGESIZE
        cuts = [*range(0, size * threads, size), self.num_bytes]

        def populate(number: int) -> None:
            start, stop = cuts[number], cuts[number + 1]
            place, length = ctypes.c_void_p(self.address + start), ctypes.c_size_t(stop - start)
            if advise(place, length, _MADV_POPULATE_WRITE):  # An older kernel.
                ctypes.memset(self.address + start, 0, stop - start)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(populate, range(threads)))

    def register(self) -> None:
        code = int(torch.cuda.cudart().cudaHostRegister(self.address, self.num_bytes, 0))  # type: ignore[no-untyped-call]
        assert code == 0, f"cudaHostRegister says {code}"

    def unregister(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]

    def leave_out_of_forks(self) -> None:
        self._map.madvise(_MADV_DONTFORK)

    def close(self) -> None:
        self._map.close()


# -- links and forks ------------------------------------------------------------------------


def run_links(record: Record) -> None:
    """Copies each way and both at once, and what a fork takes once much is pinned."""
    device = device_of(record.settings.device)
    rates = measure_host_link(device, type="this", repeats=5, source=Source("measured"))
    record.put("host_link", rates)
    gib = [rate / 2**30 for rate in (rates.to_device, rates.to_host, rates.both)]
    record.say(f"GiB/s to the device {gib[0]:.1f}, to the host {gib[1]:.1f}, both at once {gib[2]:.1f}")
    is_cuda = record.settings.device == "cuda"
    num_bytes = min(2**34, find_host_room().num_bytes // 6 // 2**21 * 2**21) if is_cuda else 2**26
    for leaves_out in (False, True):
        memory = _Mapped(num_bytes)
        memory.fault(num_cores())
        if is_cuda:
            memory.register()
        if leaves_out:
            memory.leave_out_of_forks()
        seconds, child_mib = _time_fork()
        record.say(
            f"fork with {num_bytes / 2**30:.2f} GiB {'left out' if leaves_out else 'pinned'}: "
            f"{seconds * 1e3:.1f} ms; the child's page tables {child_mib} MiB"
        )
        record.put(
            "fork_left_out" if leaves_out else "fork_pinned", {"seconds": seconds, "pte_mib": child_mib}
        )
        if is_cuda:
            memory.unregister()
        memory.close()
    record.put("max_rss_kib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


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
