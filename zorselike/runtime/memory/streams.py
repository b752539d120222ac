"""The streams on which one rank's device works, and the order between them.

Compute is whatever stream the caller is on; gathers, reductions, copies each way and optimizer updates have
their own.
Rules that keep memory safe without `record_stream`, whose effect on memory depends on timing (torch itself
uses it for what NCCL sends and receives between two ranks):

- Memory belongs to the stream on which it was allocated. It is given back (its storage resized to
  nothing, or the last reference dropped) only after that stream waits for its last use elsewhere.
- What reads a buffer on one stream waits for the event of who wrote it on another.
- Inside `with torch.cuda.stream(s)` the current stream is `s`, so "wait for compute" always names
  the stream that was current when the step began.

Copies of optimizer state move most bytes and are the least urgent. That parameters and activations have
streams of their own is not enough: a device's copy engine goes on with one stream's copies as long as there
are any, whatever the priorities. So what is long takes turns on two streams (`turns.py`), and others come in
between.

A CPU rank does each thing at once and in order; its streams, which are the base classes, do nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Event:
    """The end of all that one stream had been given when the event was recorded."""

    def synchronize(self) -> None:
        """Blocks this thread until then."""


class Stream:
    """An order of execution on the device."""

    def record(self) -> Event:
        """An event after everything that this stream has been given so far."""
        return _OVER

    def wait(self, event: Event) -> None:
        """What this stream is given from now on runs after the event."""

    def use(self) -> AbstractContextManager[Any]:
        """What is started inside goes to this stream, and memory comes from its pool."""
        return nullcontext()


class Streams:
    """A rank's streams."""

    compute: Stream
    """Forwards and backwards: the stream that was current when the step began."""
    gather: Stream
    """All-gathers of parameters."""
    reduce: Stream
    """Reductions of gradients, where they are no part of a backward."""
    load: Stream
    """Parameters, host to device."""
    load_state: Stream
    """Optimizer state and deferred gradients, host to device."""
    store: Stream
    """Parameters, gradients and optimizer state, device to host."""
    fetch: Stream
    """Activations, host to device."""
    stash: Stream
    """Activations, device to host."""
    send_rows: Stream
    """What goes to another rank over host memory, device to host."""
    receive_rows: Stream
    """What comes so, host to device: never given a copy before its rows are there."""
    update: Stream
    """Optimizer updates."""
    load_turns: Stream
    """Takes turns with `load`."""
    load_state_turns: Stream
    """Takes turns with `load_state`."""
    store_turns: Stream
    """Takes turns with `store`."""
    is_concurrent: bool = False
    """Whether streams run beside each other at all."""

    def __init__(self) -> None:
        self.compute = self.gather = self.reduce = self.load = self.load_state = Stream()
        self.store = self.fetch = self.stash = self.update = self.compute
        self.send_rows = self.receive_rows = self.compute
        self.load_turns = self.load_state_turns = self.store_turns = self.compute

    def begin(self) -> None:
        """Starts a step: takes the current stream for compute."""

    def beside(self, stream: Stream) -> Stream:
        """The stream that takes turns with one of those that copy long."""
        turns = {
            self.load: self.load_turns,
            self.load_state: self.load_state_turns,
            self.store: self.store_turns,
        }
        return turns[stream]

    def make(self, name: str) -> Stream:
        """One more stream."""
        return self.compute

    def of(self, handle: Any) -> Stream:
        """One of torch's own."""
        return self.compute


_OVER = Event()
"""On a CPU rank everything is over as soon as it is started."""


def make_streams(device: torch.device) -> Streams:
    """Streams of a CUDA device; for a CPU rank ones that do nothing."""
    return _CudaStreams(device) if device.type == "cuda" else Streams()


class _CudaEvent(Event):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        self.event.synchronize()


class _CudaStream(Stream):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self) -> Event:
        # A thread that waits for it sleeps, and does not take a core from the others.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return _CudaEvent(self._stream.record_event(event))

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)

    def use(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)


class _CudaStreams(Streams):
    is_concurrent = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

        self.gather, self.reduce, self.fetch = (self.make(name) for name in ("gather", "reduce", "fetch"))
        self.load, self.load_state = self.make("load"), self.make("load state")
        self.store, self.stash = self.make("store"), self.make("stash")
        self.send_rows, self.receive_rows = self.make("send rows"), self.make("receive rows")
        self.load_turns, self.load_state_turns = self.make("load turns"), self.make("load state turns")
        self.store_turns = self.make("store turns")
        self.update = _CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self.begin()

    def make(self, name: str) -> Stream:
        """One that shares nothing with NCCL's: torch deals 32 streams of each priority over and over again,
        and nothing of ours may stand behind a receive that waits for its sender. The device knows no priority
        of copies; optimizer updates shall have none."""
        return _CudaStream(torch.cuda.Stream(self._device, priority=-1))  # type: ignore[no-untyped-call]

    def of(self, handle: torch.cuda.Stream) -> Stream:
        return _CudaStream(handle)

    def begin(self) -> None:
        self.compute = _CudaStream(torch.cuda.current_stream(self._device))
