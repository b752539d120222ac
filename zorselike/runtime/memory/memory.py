"""Streams, host buffers and the ledger of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zorselike.runtime.memory.host_memory import HostPool
from zorselike.runtime.memory.ledger import Ledger
from zorselike.runtime.memory.streams import Streams


@dataclass(frozen=True)
class Memory:
    """One rank's device and host memory."""

    device: torch.device
    streams: Streams
    pool: HostPool
    ledger: Ledger

    @classmethod
    def of(cls, device: torch.device, streams: Streams) -> Memory:
        ledger = Ledger()
        return cls(device, streams, HostPool(ledger, pin=device.type == "cuda"), ledger)
