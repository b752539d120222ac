"""What the kernel is told about pinned memory, and when the driver is asked; the driver is a stand-in."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import RunRanks
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from zorselike.errors import ConfigError
from zorselike.runtime.memory import pinned
from zorselike.runtime.memory.memory import HostPool, Ledger

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20
SIZES = [3 * MIB + 8, 70 * MIB, 100]
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()


@dataclass
class Mapping:
    """A part of a process's memory."""

    start: int
    stop: int
    resident_bytes: int = 0
    flags: tuple[str, ...] = ()


def mappings(start: int, num_bytes: int) -> list[Mapping]:
    """Those that so many bytes lie in."""
    found: list[Mapping] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            found.append(Mapping(*(int(address, 16) for address in words[0].split("-"))))
        elif words[0] == "Rss:":
            found[-1].resident_bytes = int(words[1]) * 1024
        elif words[0] == "VmFlags:":
            found[-1].flags = tuple(words[1:])
    return [mapping for mapping in found if mapping.start < start + num_bytes and start < mapping.stop]


def mappings_of(tensor: Tensor) -> list[Mapping]:
    return mappings(tensor.data_ptr(), tensor.numel())


@dataclass
class Driver:
    """Stands in for `torch.cuda.cudart()`: what was locked when it was asked."""

    code: int = 0
    seen: list[Mapping] = field(default_factory=list)
    locked: set[int] = field(default_factory=set)
    last_error: int = 0

    def cudaHostRegister(self, address: int, num_bytes: int, _: int) -> int:
        assert address % 4096 == num_bytes % 4096 == 0 and address not in self.locked
        self.seen += mappings(address, num_bytes)
        self.locked.add(address)
        self.last_error = self.code
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        self.locked.remove(address)

    def start_kernel(self) -> None:
        """As the runtime has it: what went wrong before is said now, and once."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")


@contextmanager
def on_card(driver: Driver, used: list[int]) -> Iterator[None]:
    """Card 5, with this driver; `used`: cards that were asked for by number."""

    def use(number: int) -> AbstractContextManager[None]:
        used.append(number)
        return nullcontext()

    with (
        mock.patch.object(pinned, "_cudart", lambda: driver),
        mock.patch.object(pinned, "_start_kernel", lambda: driver.start_kernel()),
        mock.patch.object(torch.cuda, "current_device", lambda: 5),
        mock.patch.object(torch.cuda, "device", use),
    ):
        yield


def fork_and_look(tensor: Tensor) -> tuple[int, bool]:
    """How a child ends that reads a tensor, and whether another finds it mapped at all."""
    codes = []
    for reads in (True, False):
        pid = os.fork()
        if pid == 0:
            faulthandler.disable()
            os._exit(int(tensor[0]) if reads else len(mappings_of(tensor)))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes[0], bool(codes[1])


def pin(rank: int, world_size: int) -> None:
    driver, used = Driver(), []
    with on_card(driver, used):
        ledger = Ledger()
        pool = HostPool(ledger, pin=True)
        pool.reserve("activations", SIZES)
        (slab,) = pool._slabs
        assert slab.numel() == ledger.held("activations", "host") == -(-sum(SIZES) // 4096) * 4096
        # All of it was there before the driver was asked, and no fork will have it.
        assert sum(part.resident_bytes for part in driver.seen) == slab.numel()
        for part in driver.seen:
            assert "dc" in part.flags and (not HAS_HUGE_PAGES or "hg" in part.flags)
        assert slab.data_ptr() % (2 * MIB) == 0
        for number, buffer in zip(count(1), [pool.take("activations", size) for size in SIZES], strict=False):
            buffer.fill_(number)
        assert fork_and_look(slab) == (-11, False)
        rows = torch.arange(6).view(6, 1)
        loader = DataLoader(TensorDataset(rows), batch_size=2, num_workers=1, multiprocessing_context="fork")
        assert torch.equal(torch.cat([batch for (batch,) in loader]), rows)
        assert int(slab[0]) == 1
        pool.close()
        assert not driver.locked and slab.untyped_storage().nbytes() == 0

        small = HostPool(Ledger(), pin=True)
        small.reserve("activations", [100])
        held, (slab,) = small.take("activations", 100), small._slabs
        assert driver.locked == {slab.data_ptr()} and "dc" in mappings_of(slab)[0].flags
        with mock.patch.object(torch.cuda, "synchronize", lambda: None):
            del small
        assert used == [5]  # Whatever thread collects it.
        assert not driver.locked and fork_and_look(held.fill_(7)) == (7, True)


def test_pages_are_there_before_they_are_locked_and_a_fork_has_none(run_ranks: RunRanks) -> None:
    run_ranks(pin, 1, init=False)


def refuse(rank: int, world_size: int) -> None:
    driver = Driver(code=2)
    with on_card(driver, []):
        pool = HostPool(Ledger(), pin=True)
        with pytest.raises(ConfigError, match=r"does not lock 0\.00 GiB .*activations \(CUDA error 2;"):
            pool.reserve("activations", [100])
    driver.start_kernel()  # What is caught does not come back where work goes on without that memory.
    assert pool._slabs == [] and len(driver.seen) == 1
    again = torch.empty(100, dtype=torch.uint8)  # Of the same pages, as likely as not.
    assert not any("dc" in part.flags for part in mappings_of(again))


def test_what_the_driver_refuses_is_given_back_as_it_was(run_ranks: RunRanks) -> None:
    run_ranks(refuse, 1, init=False)


def test_what_is_not_pinned_stays_as_it_is() -> None:
    pool = HostPool(Ledger(), pin=False)
    pool.reserve("activations", [64 * MIB])  # Less may come from a heap of which parts were advised before.
    assert not {"dc", "hg"} & {flag for part in mappings_of(pool._slabs[0]) for flag in part.flags}
