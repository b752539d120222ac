"""Random numbers that no plan changes: those of dropout, above all.

Before a module computes, torch's generators are seeded by (seed, step, the module's name, the first row of
its microbatch). So there is no state of theirs to keep, and who computes those rows does not matter. A
microbatch draws its rows' numbers together: plans that cut the batch elsewhere draw others. So do GPUs of
another type, on which torch deals the numbers to as many threads as there are multiprocessors for.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomNumbers:
    """The generators of one rank, in the thread that computes."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed % 2**64
        self._device = device
        self._step = 0
        self._first_row: int | None = None

    @contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        """Inside, a step trains; its caller's numbers go on afterwards as if there had been none."""
        self._step = step
        is_cuda = self._device.type == "cuda"
        on_host = torch.get_rng_state()
        on_device = torch.cuda.get_rng_state(self._device) if is_cuda else None
        try:
            yield
        finally:
            self._first_row = None
            torch.set_rng_state(on_host)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, self._device)

    def begin(self, first_row: int | None) -> None:
        """A microbatch's forward begins; None for one that does not train, which seeds nothing."""
        self._first_row = first_row

    def enter(self, module: str) -> None:
        """The module of this global name computes now."""
        if self._first_row is None:
            return
        key = struct.pack("<QQQ", self._seed, self._step, self._first_row) + module.encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
