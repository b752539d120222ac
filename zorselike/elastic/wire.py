"""Gloo between all members that give or take state, whoever of them will be ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from zorselike.elastic.contract import Json
from zorselike.runtime._compat import Store, make_gloo
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.state.dtypes import bytes_of


class Wire:
    """One connection between any two of them; collective to make."""

    def __init__(self, store: Store, rank: int, size: int, *, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._group = make_gloo(store, rank, size, timeout)

    def send(self, content: Tensor, target: int) -> Callable[[], object]:
        """Starts sending; gives what waits until the memory may be reused."""
        return self._group.send([content], target, 0).wait  # type: ignore[no-any-return]

    def receive(self, buffer: Tensor, source: int) -> None:
        """Waits until it is there."""
        self._group.recv([buffer], source, 0).wait()

    def gather(self, value: Json) -> list[Json]:
        """Of all, on all; collective."""
        return _gather(value, self._gather)

    def _gather(self, own: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        self._group.allgather([everyone], [own]).wait()
        return everyone


def gather_json(value: Json, group: ProcessGroup) -> list[Json]:
    """Of all processes of a Gloo group, on all; collective."""

    def gather(own: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(everyone, own, group=group)
        return everyone

    return _gather(value, gather)


def to_bytes(value: Json) -> Tensor:
    """As a tensor, `uint8 [bytes]`."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(text: Tensor) -> Json:
    """The inverse."""
    value: Json = json.loads(bytes(bytes_of(text)))
    return value


def _gather(value: Json, gather: Callable[[Tensor], list[Tensor]]) -> list[Json]:
    own = to_bytes(value)
    sizes = [int(size) for size in gather(torch.tensor([own.numel()], device="cpu"))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: own.numel()] = own
    return [from_bytes(text[:size]) for text, size in zip(gather(padded), sizes, strict=True)]
