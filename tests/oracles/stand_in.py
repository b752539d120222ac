"""Streams for a CPU rank that find races: what a GPU's streams would leave unordered.

A CPU rank does everything at once and in order, so code that forgets to wait gives right numbers
there. `RaceStreams` stands in for `zorselike.runtime.memory.streams` and proves the waits instead:

- every stream has a vector clock, which an event copies, a wait merges, and `Event.synchronize`
  merges into the host's, after which comes whatever the host starts later;
- a dispatch mode sees every operator, forward, backward and collective, takes it for work of the
  current stream, and compares the bytes that it reads and writes with earlier accesses of other
  streams: two of which one writes must be ordered by the clocks;
- memory belongs to the stream that was current when it was allocated, or refilled by `resize_`.
  Whatever that stream allocates next may be the same memory, so by then it must have waited for
  all that other streams did with what has been freed since;
- FSDP2 uses streams and events of `torch.cpu` as it uses CUDA's; these become such streams too,
  and a collective runs on a stream of its group until its work is waited for.

It does not see what the host itself reads (`tolist`, `numpy`), what other threads do, and memory
that one operator both allocates and frees.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # A dispatch mode needs it: once here, not in every rank.
import torch.distributed as dist
from memory_races import Clocks, StreamRace
from operator_roles import Role, flatten, name_arguments, role_of, split_arguments, tensors_in
from storages import Storages
from stream_work import (
    Frames,
    HostRead,
    Judge,
    Launch,
    Output,
    Range,
    Record,
    Step,
    Synchronize,
    Wait,
    Work,
    own_frames,
)
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zorselike.runtime.memory.streams import Event, Stream, Streams

__all__ = ["RaceEvent", "RaceStream", "RaceStreams", "StreamRace"]


class RaceEvent(Event):
    """What had been given to a stream when it was recorded."""

    def __init__(self, number: int, streams: RaceStreams) -> None:
        self.number = number
        self._streams = streams

    def synchronize(self) -> None:
        self._streams.give(Synchronize(self.number, own_frames()))


class RaceStream(Stream):
    """One order of execution."""

    def __init__(self, number: int, name: str, handle: torch.cpu.Stream, streams: RaceStreams) -> None:
        self.number = number
        self.name = name
        self.handle = handle
        """What FSDP2 knows it as."""
        self._streams = streams

    def __repr__(self) -> str:
        return f"RaceStream({self.name})"

    def record(self) -> RaceEvent:
        return self._streams.record(self, own_frames())

    def wait(self, event: Event) -> None:
        assert isinstance(event, RaceEvent)
        self._streams.give(Wait(event.number, self.number, own_frames()))

    def use(self) -> AbstractContextManager[None]:
        return self._streams.using(self)


class RaceStreams(Streams):
    """A CPU rank's streams as a race detector; `races` is what `watching()` found.

    `raises`: the first race is raised where it happens. `checks_host_reads`: `item()` is a read by
    the host, which must have synchronised with whoever wrote; otherwise it is the current stream's.
    """

    is_concurrent = True

    def __init__(self, *, raises: bool = False, checks_host_reads: bool = False) -> None:
        self.clocks = Clocks(raises=raises)
        self.judges: list[Judge] = [self.clocks]
        """Told of all work."""
        self.label = ""
        """Put before operators in messages, such as the action that runs."""
        self.on_resize: Callable[[int], None] | None = None
        """Told `resident_bytes` after each `resize_` of a storage."""
        self.num_operators: Counter[str] = Counter()
        """By the name of a stream: how many operators it was given, to see that a test gets there."""
        self.checks_host_reads = checks_host_reads
        self._events = count()
        self._streams: list[RaceStream] = []
        self._of_handle: dict[torch.cpu.Stream, RaceStream] = {}
        self._of_group: dict[str, RaceStream] = {}
        self._chosen = threading.local()
        self.default = self.compute = self.make("compute", torch.cpu.current_stream())
        for name, kind in Streams.__annotations__.items():
            if kind == "Stream" and name != "compute":
                setattr(self, name, self.make(name))
        self.storages = Storages(self.give, default=self.default.number)

    @property
    def races(self) -> list[StreamRace]:
        return self.clocks.races

    @property
    def pairs(self) -> list[tuple[str, str, str]]:
        """Of each race: its kind, the earlier stream and the later one."""
        return [(race.kind, race.earlier_stream, race.later_stream) for race in self.races]

    def make(self, name: str, handle: torch.cpu.Stream | None = None) -> RaceStream:
        """One more stream."""
        if handle is None:
            handle = object.__new__(torch.cpu.Stream)
        stream = RaceStream(len(self._streams), name, handle, self)
        self._streams.append(stream)
        self._of_handle[handle] = stream
        return stream

    def begin(self) -> None:
        self.compute = self.current

    @property
    def current(self) -> RaceStream:
        """This thread's current stream."""
        chosen: list[RaceStream] = getattr(self._chosen, "streams", [])
        return chosen[-1] if chosen else self.default

    @contextmanager
    def using(self, stream: RaceStream) -> Iterator[None]:
        """Makes a stream current; nests."""
        if not hasattr(self._chosen, "streams"):
            self._chosen.streams = []
        self._chosen.streams.append(stream)
        try:
            yield
        finally:
            self._chosen.streams.pop()

    @contextmanager
    def watching(self) -> Iterator[RaceStreams]:
        """Sees what this thread's operators do meanwhile, and gives FSDP2 such streams too."""
        mode = _Mode(self)
        resize = torch.UntypedStorage.resize_
        replacements: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch.UntypedStorage, "resize_", lambda storage, size: self._resize(resize, storage, size)),
            (dist.Work, "wait", mode.waiting(dist.Work.wait)),
            (torch.accelerator, "current_stream", lambda device=None: self.current.handle),
            *_torch_cpu(self),
        ]
        with ExitStack() as stack:
            for owner, name, replacement in replacements:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            stack.enter_context(mode)
            yield self

    def give(self, work: Work) -> None:
        """Tells the judges, but for other threads' work, whose order is another every time."""
        if threading.current_thread() is threading.main_thread():
            for judge in self.judges:
                judge.see(work)

    def record(self, stream: RaceStream, frames: Frames = ()) -> RaceEvent:
        event = RaceEvent(next(self._events), self)
        self.give(Record(event.number, stream.number, frames))
        return event

    def of(self, handle: torch.cpu.Stream | None) -> RaceStream:
        """The stream that stands for one of `torch.cpu`'s; for None the current one."""
        if handle is None:
            return self.current
        return self._of_handle.get(handle) or self.make(f"torch.cpu {len(self._streams)}", handle)

    def of_group(self, name: str) -> RaceStream:
        """The stream on which the collectives of a process group run."""
        if name not in self._of_group:
            self._of_group[name] = self.make(f"group {name}")
        return self._of_group[name]

    # -- memory ----------------------------------------------------------------------------

    def name_storage(self, tensor: Tensor, name: str) -> None:
        """How messages call the memory of a tensor."""
        self.storages.buffer(_storage_of(tensor)).name = name

    def mark_host(self, tensor: Tensor) -> None:
        """The tensor, just made, stands for host memory, which is of no stream's pool."""
        self.storages.mark_host(_storage_of(tensor))

    def resident_bytes(self) -> int:
        """Bytes of all living storages that were ever resized."""
        return self.storages.resident_bytes()

    def _resize(self, resize: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type == "cpu" and storage.nbytes() != size:
            self.storages.resize(storage, size, self.step(self.current, "resize_"))
        result = resize(storage, size)
        if self.on_resize is not None:
            self.on_resize(self.resident_bytes())
        return result

    def ranges(self, tensors: list[Tensor], step: Step, *, writes: bool) -> list[Range]:
        """The bytes of those tensors that have any."""
        found = []
        for tensor in tensors:
            if tensor.numel():
                found.append(self.storages.range(tensor, writes=writes))
                if not tensor.untyped_storage().nbytes():  # The operator would crash.
                    raise self.clocks.report("freed", found[-1].buffer, None, step)
        return found

    def step(self, stream: RaceStream, what: str) -> Step:
        """A description of what the stream does now."""
        return Step(stream.number, stream.name, f"{self.label} {what}" if self.label else what, own_frames())


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _torch_cpu(streams: RaceStreams) -> list[tuple[Any, str, Callable[..., Any]]]:
    """What `torch.cpu` has of streams and does nothing with: owner, name and replacement."""
    handles, events = torch.cpu.Stream, torch.cpu.Event

    def initialise(handle: Any, *args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        assigned = re.search(r"(\w+) = ", linecache.getline(frame.f_code.co_filename, frame.f_lineno))
        streams.make(f"FSDP's {assigned[1]}" if assigned else "of torch.cpu", handle)

    def record(event: Any, handle: Any = None) -> None:
        event.recorded = streams.record(streams.of(handle), own_frames())

    def record_event(handle: Any) -> Any:
        event = events()
        record(event, handle)
        return event

    def wait_event(handle: Any, event: Any) -> None:
        if hasattr(event, "recorded"):
            streams.give(Wait(event.recorded.number, streams.of(handle).number, own_frames(), of_fsdp=True))

    return [
        (torch.cpu, "current_stream", lambda device=None: streams.current.handle),
        (torch.cpu, "stream", lambda handle: streams.using(streams.of(handle))),
        (handles, "__init__", initialise),
        (handles, "record_event", record_event),
        (handles, "wait_event", wait_event),
        (handles, "wait_stream", lambda handle, other: wait_event(handle, record_event(other))),
        (events, "record", record),
        (events, "wait", lambda event, handle=None: wait_event(handle, event)),
        (events, "synchronize", lambda event: event.recorded.synchronize()),
    ]


class _Mode(TorchDispatchMode):
    """Tells the streams what every operator reads and writes."""

    def __init__(self, streams: RaceStreams) -> None:
        super().__init__()
        self._streams = streams
        self._works: dict[int, tuple[dist.Work, RaceEvent]] = {}
        """By identity, what is not waited for yet."""

    def waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """`Work.wait` that makes the current stream wait too."""

        def wait_and_learn(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            result = wait(work, *args, **kwargs)
            if id(work) in self._works:
                event = self._works.pop(id(work))[1]
                self._streams.give(Wait(event.number, self._streams.current.number, own_frames()))
            return result

        return wait_and_learn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # It comes back as operators on local tensors.
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        role = role_of(func)
        if role is Role.METADATA:
            return func(*args, **kwargs)
        if role is Role.COLLECTIVE:
            return self._exchange(func, args, kwargs)
        stream = self._streams.current
        step = self._streams.step(stream, str(func))
        if role is Role.HOST_READ and self._streams.checks_host_reads:
            for touched in self._streams.ranges([args[0]], step, writes=False):
                self._streams.give(HostRead(step, touched))
        elif role is not Role.ALLOCATION:
            self._launch(func, args, kwargs, stream, step)
        result = func(*args, **kwargs)
        self._produce(func, role, result, step)
        return result

    def _exchange(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A collective; without `async_op` the current stream waits at once, so it is its own work."""
        streams, stream = self._streams, self._streams.current
        given = name_arguments(func, args, kwargs)
        if given.get("async_op", given.get("asyncOp", True)):
            issued = streams.record(stream)
            stream = streams.of_group(dist.ProcessGroup.unbox(given["process_group"]).group_name)
            streams.give(Wait(issued.number, stream.number))
        self._launch(func, args, kwargs, stream, streams.step(stream, str(func)))
        result = func(*args, **kwargs)
        for boxed in flatten(result):
            if isinstance(boxed, torch.ScriptObject):
                work = dist.Work.unbox(boxed)
                self._works[id(work)] = (work, streams.record(stream))
        return result

    def _launch(self, func: Any, args: Any, kwargs: Any, stream: RaceStream, step: Step) -> None:
        ranges: list[Range] = []
        if role_of(func) is not Role.FACTORY:
            self._streams.num_operators[stream.name] += 1
            read, written = split_arguments(func, args, kwargs)
            for tensors, writes in ((read, False), (written, True)):
                ranges += self._streams.ranges(tensors, step, writes=writes)
        self._streams.give(Launch(step, tuple(ranges)))

    def _produce(self, func: Any, role: Role, result: Any, step: Step) -> None:
        storages = self._streams.storages
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            is_new = not storages.knows(storage) and storage.nbytes() > 0
            if is_new:
                storages.allocate(storage, storage.nbytes(), step)
            # An output that is an argument's memory unannounced: of aten's it is a view
            # (`_unsafe_view`), others may have written it (`fsdp::all_gather_copy_in`).
            if role is not Role.ALLOCATION and (is_new or getattr(func, "namespace", "") != "aten"):
                for touched in self._streams.ranges([tensor], step, writes=True):
                    self._streams.give(Output(step, touched))
