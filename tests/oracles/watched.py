"""Pipelines whose streams the race detector watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from stand_in import RaceStreams
from torch import Tensor

from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.memory import turns
from zorselike.runtime.memory.memory import HostPool
from zorselike.runtime.ministage import settings


@contextmanager
def on(streams: RaceStreams) -> Iterator[None]:
    """Pipelines made inside run on these streams, under watch."""
    allocate, enter = HostPool._allocate, Alarm.enter

    def allocate_on_host(pool: HostPool, *args: Any) -> Tensor:
        slab = allocate(pool, *args)
        streams.mark_host(slab)
        streams.name_storage(slab, f"host memory for {args[0]}")
        return slab

    def enter_action(alarm: Alarm, action: Any) -> None:
        streams.label = str(action)
        enter(alarm, action)

    with (
        mock.patch.object(settings, "make_streams", lambda device: streams),
        mock.patch.object(HostPool, "_allocate", allocate_on_host),
        mock.patch.object(Alarm, "enter", enter_action),
        mock.patch.object(turns, "PIECE_BYTES", 256),  # So that tiny tensors are several.
        streams.watching(),
    ):
        yield
