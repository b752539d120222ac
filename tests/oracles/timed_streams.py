"""Streams with a time of their own: the order in which the real runtime waits, at the speed that is said.

A CPU rank computes at once; `TimedStreams` takes the place of its streams and only adds up when each piece of
work would be over on a device: forwards, backwards and updates by what their ministage takes, copies by
their bytes. Streams of FSDP2 itself are not seen, so a group has one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.memory.streams import Event, Stream, Streams
from zorselike.runtime.ministage import settings
from zorselike.runtime.ministage.unit import CallOrder
from zorselike.runtime.ministage.updates import Updates
from zorselike.schedule.actions import Action, Kind


@dataclass(frozen=True)
class Speeds:
    """What work takes, in seconds."""

    forward_s: tuple[float, ...]
    """A row, by ministage."""
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    bytes_per_s: float
    """Of a copy, whatever else is copied."""


class TimedEvent(Event):
    def __init__(self, at_s: float, streams: TimedStreams) -> None:
        self.at_s = at_s
        self._streams = streams

    def synchronize(self) -> None:
        self._streams.host_s = max(self._streams.host_s, self.at_s)


class TimedStream(Stream):
    """When all that it was given is over."""

    def __init__(self, name: str, streams: TimedStreams) -> None:
        self.name = name
        self.end_s = 0.0
        self._streams = streams

    def record(self) -> TimedEvent:
        return TimedEvent(self.end_s, self._streams)

    def wait(self, event: Event) -> None:
        assert isinstance(event, TimedEvent)
        self.end_s = max(self.end_s, event.at_s)

    @contextmanager
    def use(self) -> Iterator[None]:  # type: ignore[override]
        self._streams.used.append(self)
        try:
            yield
        finally:
            self._streams.used.pop()

    def work(self, seconds: float) -> None:
        """Is given work now."""
        self.end_s = max(self.end_s, self._streams.host_s) + seconds


class TimedStreams(Streams):
    """A rank's streams and its host's thread, which takes no time but where it waits."""

    is_concurrent = True

    def __init__(self, speeds: Speeds, rows: Sequence[int]) -> None:
        """`rows`: of each microbatch."""
        self.host_s = 0.0
        self.used: list[TimedStream] = []
        self._speeds, self._rows = speeds, rows
        self._action: Action | None = None
        for name, kind in Streams.__annotations__.items():
            if kind == "Stream":
                setattr(self, name, TimedStream(name, self))

    def begin(self) -> None:
        """Compute is always the same."""

    @property
    def now_s(self) -> float:
        """When the step so far is over."""
        assert isinstance(self.compute, TimedStream)
        return max(self.host_s, self.compute.end_s)

    def enter(self, action: Action) -> None:
        self._action = action

    def compute_now(self, kind: Kind, seconds: Sequence[float]) -> None:
        """What was computed belongs to an action of this kind, or takes no time."""
        action = self._action
        if action is not None and action.kind is kind:
            assert action.ministage is not None and action.microbatch is not None
            assert isinstance(self.compute, TimedStream)
            self.compute.work(seconds[action.ministage] * self._rows[action.microbatch])

    def copy(self, num_bytes: int) -> None:
        if self.used and self.used[-1] not in (self.gather, self.update):  # What these copy is on the device.
            self.used[-1].work(num_bytes / self._speeds.bytes_per_s)

    def update_now(self) -> None:
        assert self._action is not None and self._action.ministage is not None
        assert isinstance(self.update, TimedStream)
        self.update.work(self._speeds.update_s[self._action.ministage])

    def adamw(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """An optimizer whose steps take their time."""
        streams = self

        class Timed(torch.optim.AdamW):
            def step(self, closure: Any = None) -> None:
                streams.update_now()
                super().step()

        return Timed([parameter for _, parameter in named], lr=1e-3)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Pipelines made inside run on these streams."""
        speeds = self._speeds

        def enter(before: Callable[..., Any], alarm: Alarm, action: Action) -> None:
            self.enter(action)
            before(alarm, action)

        def end_forward(before: Callable[..., Any], order: CallOrder) -> None:
            before(order)
            self.compute_now(Kind.F, speeds.forward_s)

        def backward(before: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            before(*args, **kwargs)
            self.compute_now(Kind.B, speeds.backward_s)

        def copy(before: Callable[..., Any], target: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.copy(target.numel() * target.itemsize)
            return before(target, *args, **kwargs)

        def find_norm(before: Callable[..., Any], updates: Updates) -> None:
            before(updates)
            self.host_s = self.now_s  # It reads what the device has summed.

        replacements: Mapping[tuple[Any, str], Callable[..., Any]] = {
            (Alarm, "enter"): enter,
            (CallOrder, "end"): end_forward,
            (torch.autograd, "backward"): backward,
            (Tensor, "copy_"): copy,
            (Updates, "find_global_norm"): find_norm,
        }
        patches = [mock.patch.object(settings, "make_streams", lambda device: self)]
        for (owner, name), replacement in replacements.items():
            patches.append(mock.patch.object(owner, name, _around(getattr(owner, name), replacement)))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def _around(before: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: replacement(before, *args, **kwargs)
