"""A burst of computation, such as comes before every message of a step."""

from __future__ import annotations

import time

import torch

SECONDS = 1e-3
_WIDTH = 96


class ComputeBurst:
    """What a rank that computes by itself does between two measurements of wires: threads that carry messages
    wake up from it as in a step, and not as from the message before. A device's messages have its own
    engines; there it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._factors = torch.ones(2, _WIDTH, _WIDTH)

    def __call__(self, seconds: float = SECONDS) -> None:
        """Computes for so long."""
        if self._on_cpu:
            end_s = time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                torch.mm(self._factors[0], self._factors[1])
