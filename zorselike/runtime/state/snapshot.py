"""What a rank saves, as it was between two steps, while the next one runs.

Each ministage's part is copied to host memory, and its next update waits for that copy alone: on a GPU on a
stream of its own, what is offloaded and all on a CPU rank by a thread. Where the host has no room for copies,
the parts are the live tensors themselves, and training waits until they are written.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zorselike.errors import ConfigError
from zorselike.plan.holdings import Box
from zorselike.runtime.memory.host_backed import Located
from zorselike.runtime.memory.memory import CHECKPOINT_COPIES, Memory
from zorselike.runtime.memory.pinned import copy_to_host
from zorselike.runtime.memory.streams import Event, Stream
from zorselike.runtime.ministage.named_state import NamedState, OptimizerFacts, Part
from zorselike.runtime.state.exchange import part_of


class Saved(NamedTuple):
    """A part of a tensor that this rank writes."""

    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype


class Snapshot:
    """One moment's state of one rank. Made between steps; `take` and `read` are the thread's."""

    def __init__(
        self,
        states: Mapping[int, NamedState],
        memory: Memory,
        stream: Stream,
        *,
        model_only: bool,
        stages: bool,
        left_out: Collection[str] = (),
        purpose: str = CHECKPOINT_COPIES,
    ) -> None:
        """`stages`: whether to copy, on `stream`. Then the next step may begin when this returns.
        `left_out`: names of what is not saved. `purpose`: of the copies' memory; the one before of the same
        purpose has been taken."""
        self._states, self._memory, self._purpose = states, memory, purpose
        memory.streams.begin()
        compute = memory.streams.compute
        self._stream = stream
        stream.wait(compute.record())
        # The last ministage is the first to be updated.
        self.order = sorted(states, reverse=True)
        with stream.use():  # Of buffers, copies are made.
            self._parts: dict[int, list[Part]] = {
                i: [
                    part
                    for part in states[i].parts(model_only=model_only)
                    if part.written.num_elements and part.written.name not in left_out
                ]
                for i in self.order
            }
        compute.wait(stream.record())  # Forwards may change buffers.
        # Found now: the next step moves what is offloaded, and in the middle of that it is nowhere whole.
        self._sources = {i: [part.locate() for part in self._parts[i]] for i in self.order}
        self._options = {} if model_only else {i: states[i].options() for i in self.order}
        self._numbers = {} if model_only else {i: states[i].numbers() for i in self.order}
        self._counted: dict[int, Tensor] = {}
        """Numbers that were on the device, on their way to the host."""
        self._taken = {i: threading.Event() for i in self.order}
        self.failure: BaseException | None = None
        self._buffers = self._make_buffers() if stages else None
        self.is_staged = self._buffers is not None
        self._queues = self.is_staged and memory.streams.is_concurrent
        self._copied: dict[int, Event] = {}
        with self._stream.use():
            for i in self.order:
                self._queue(i)
                self._copied[i] = self._stream.record()
        for i in self.order:
            # It stays when all is written: so those who change values come after the copy in any case.
            states[i].ministage.before_change[purpose] = partial(_await, self._copied[i], self._taken[i])

    def saved(self, ministage: int) -> list[Saved]:
        """What there is to write of a ministage, in the order of `read`."""
        return [Saved(part.written, part.shape, part.dtype) for part in self._parts[ministage]]

    def take(self) -> None:
        """Copies what is left to copy, ministage by ministage; never raises: what went wrong is in
        `failure`."""
        try:
            for i in self.order:
                if self.is_staged:
                    for part, source, copy in self._copies(i):
                        if not self._queues or source.is_away:
                            copy.copy_(_written(part, source.whole()))
                    self.release(i)
            for i in self.order:
                self._copied[i].synchronize()
        except BaseException as error:
            self.failure = error
            for i in self.order:
                self.release(i)

    def _queue(self, ministage: int) -> None:
        """Starts what a device copies by itself."""
        if self._queues:
            for part, source, copy in self._copies(ministage):
                if not source.is_away:
                    copy.copy_(_written(part, source.values), non_blocking=True)
        counted = [tensor for _, tensor in self._numbers[ministage].on_device] if self._numbers else []
        if counted:
            stacked = torch.stack([tensor.detach().to(torch.float64) for tensor in counted])
            self._counted[ministage], _ = copy_to_host(stacked, self._stream)

    def buffers(self) -> list[Tensor]:
        """Where the copies are, in the order of the ministages; `lay_out` says what lies where."""
        return [self._buffers[i] for i in self.order] if self._buffers is not None else []

    def read(self, ministage: int) -> Iterator[Tensor]:
        """Contents in host memory, contiguous, one after another."""
        if self.is_staged:
            yield from self._targets(ministage)
            return
        with self._stream.use():
            for part, source in zip(self._parts[ministage], self._sources[ministage], strict=True):
                values = _written(part, source.whole()).to("cpu", non_blocking=True)
                self._stream.record().synchronize()
                yield values.contiguous()

    def release(self, ministage: int) -> None:
        """Lets a ministage's state change."""
        self._taken[ministage].set()

    def optimizer_facts(self, ministage: int) -> OptimizerFacts | None:
        """Once it is taken; None for a model alone, and where nothing trains."""
        optimizer = self._states[ministage].optimizer
        if not self._options or optimizer is None:
            return None
        numbers = self._numbers[ministage]
        if ministage in self._counted:
            for (entry, tensor), value in zip(
                numbers.on_device, self._counted[ministage].tolist(), strict=True
            ):
                entry["value"] = value if tensor.is_floating_point() else int(value)
        return OptimizerFacts(type(optimizer).__name__, self._options[ministage], numbers.plain)

    def close(self) -> None:
        """Gives the copies' memory back, for the next snapshot."""
        for i in self.order:
            self.release(i)
        for buffer in (self._buffers or {}).values():
            self._memory.pool.give_back(self._purpose, buffer)
        self._buffers = None

    # --------------------------------------------------------------------------------------

    def _make_buffers(self) -> dict[int, Tensor] | None:
        """One of the size of each ministage's parts; None without room for them."""
        pool = self._memory.pool
        sizes = {i: measure(self.saved(i)) for i in self.order}
        try:
            pool.reserve(self._purpose, list(sizes.values()))
        except ConfigError:
            return None
        return {i: pool.take(self._purpose, size) for i, size in sizes.items()}

    def _copies(self, ministage: int) -> Iterator[tuple[Part, Located, Tensor]]:
        """What is copied, where it is, and where to."""
        return zip(self._parts[ministage], self._sources[ministage], self._targets(ministage), strict=True)

    def _targets(self, ministage: int) -> Iterator[Tensor]:
        if self._buffers is not None:
            yield from lay_out(self.saved(ministage), self._buffers[ministage])


def lay_out(saved: Iterable[Saved], buffer: Tensor) -> Iterator[Tensor]:
    """The tensors of a ministage in their buffer, one after another."""
    start = 0
    for one in saved:
        num_bytes = one.box.num_elements * one.dtype.itemsize
        yield buffer[start : start + num_bytes].view(one.dtype).view(one.box.shape)
        start += _align(num_bytes)


def measure(saved: Iterable[Saved]) -> int:
    """Bytes of such a buffer."""
    return sum(_align(one.box.num_elements * one.dtype.itemsize) for one in saved)


def _await(copied: Event, taken: threading.Event, stream: Stream) -> None:
    stream.wait(copied)
    taken.wait()


_ALIGNMENT = 64


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _written(part: Part, values: Tensor) -> Tensor:
    """What this rank writes of the values that it holds."""
    return part_of(part.written, part.held, values)
