"""Slow links between nodes for anything that uses `torch.distributed`, by sleeping.

Patches the public calls (`isend`, the gathers and reductions), so that whatever runs on top,
ours or torch's, is held up alike, for as long as some `Wires` say. Those of this file: an ordered
pair of nodes is one link that carries one message at a time, shared by all ranks of the node. A
message takes latency plus bytes over bandwidth; a collective across nodes takes what a ring
through its members would. Needs no root and no network namespaces.
"""

from __future__ import annotations

import functools
import inspect
import mmap
import multiprocessing
import queue
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from second_simulator.operations import Links

_SLOTS = 256
"""Collectives of one group that may be under way or just done, of which the end is remembered."""

_COLLECTIVES = {
    "all_gather_single": ("output", 1),
    "all_gather_into_tensor": ("output", 1),
    "reduce_scatter_single": ("input", 1),
    "reduce_scatter_tensor": ("input", 1),
    "all_reduce": ("tensor", 2),
}
"""Public names (some only in some versions of torch): whose bytes go how often around the ring."""


Carry = Callable[[float], float]
"""Waits until a message that may start at a monotonic time has arrived; returns that time."""


class Wires(Protocol):
    """How long messages and collectives take; one object, made before ranks are forked."""

    def delays_message(self, source: int, target: int) -> bool:
        """Whether a message between these ranks takes any time."""

    def post(self, source: int, target: int, num_bytes: int) -> Carry:
        """A message is sent now; a thread calls the result when those before it have arrived."""

    def delays_collective(self, members: tuple[int, ...]) -> bool:
        """Whether a collective of these ranks takes any time."""

    def collect(self, rank: int, members: tuple[int, ...], number: int, num_bytes: int, rounds: int) -> None:
        """All members have joined their collective `number` over a whole buffer of so many bytes, which
        go `rounds` times around the ring; waits until they have moved."""


class SharedLinks:
    """When each link is free again, in memory shared by all ranks; made before they are forked."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._num_nodes = max(links.node_of_rank) + 1
        self._table = self._num_nodes**2 * 8
        num_masks = 2 ** len(links.node_of_rank)
        self._memory = mmap.mmap(-1, self._table + num_masks * _SLOTS * 16)
        self._lock = multiprocessing.get_context("fork").Lock()

    def delays_message(self, source: int, target: int) -> bool:
        return self.links.crosses(source, target)

    def post(self, source: int, target: int, num_bytes: int) -> Carry:
        """Puts a message on its link at once, behind those of all ranks."""
        edge = (self.links.node_of_rank[source], self.links.node_of_rank[target])
        with self._lock:
            arrival_s = self._reserve(edge, num_bytes) + self.links.latency_s

        def carry(_: float) -> float:
            sleep_until(arrival_s)
            return arrival_s

        return carry

    def delays_collective(self, members: tuple[int, ...]) -> bool:
        return bool(self.links.ring_edges(members))

    def collect(self, rank: int, members: tuple[int, ...], number: int, num_bytes: int, rounds: int) -> None:
        per_edge = rounds * num_bytes * (len(members) - 1) / len(members)
        sleep_until(self._reserve_collective(members, number, per_edge))

    def _reserve_collective(self, members: tuple[int, ...], number: int, num_bytes: float) -> float:
        """The end of the members' collective `number`; the first to ask puts it on the links."""
        mask = sum(1 << rank for rank in members)
        offset = self._table + (mask * _SLOTS + number % _SLOTS) * 16
        with self._lock:
            known, end_s = struct.unpack_from("dd", self._memory, offset)
            if known != number + 1:
                latency_s = (len(members) - 1) * self.links.latency_s
                edges = self.links.ring_edges(members)
                end_s = max(self._reserve(edge, num_bytes) for edge in edges) + latency_s
                struct.pack_into("dd", self._memory, offset, number + 1, end_s)
        return float(end_s)

    def _reserve(self, edge: tuple[int, int], num_bytes: float) -> float:
        offset = (edge[0] * self._num_nodes + edge[1]) * 8
        (free_s,) = struct.unpack_from("d", self._memory, offset)
        free_s = max(time.monotonic(), free_s) + num_bytes / self.links.bytes_per_s
        struct.pack_into("d", self._memory, offset, free_s)
        return float(free_s)


def collective_names() -> dict[str, str]:
    """What this version of torch calls the collectives of one flat tensor."""
    names = {
        "all_gather": ("all_gather_single", "all_gather_into_tensor"),
        "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    }
    return {op: next(name for name in known if hasattr(dist, name)) for op, known in names.items()}


class _DelayedWork(dist.Work):
    """A transfer that is complete when a thread of ours says so."""

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Event()
        self._rest: Any = None

    def complete(self, rest: Any = None) -> None:
        """`rest`: what is still to be waited for."""
        self._rest = rest
        self._done.set()

    def wait(self, timeout: timedelta = timedelta(minutes=5)) -> bool:
        if not self._done.wait(timeout.total_seconds()):
            raise RuntimeError(f"a transfer over a slow link did not end in {timeout}")
        if self._rest is not None:
            self._rest.wait()
        return True

    def is_completed(self) -> bool:
        return self._done.is_set() and (self._rest is None or self._rest.is_completed())


class LinkSleeper:
    """One rank's end of the wires; after `install` the calls of `torch.distributed` are slowed
    whenever `is_on`."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.is_on = False
        self._wires = wires
        self._rank = rank
        self._free_s: dict[Hashable, float] = defaultdict(float)
        self._numbers: dict[tuple[int, ...], int] = defaultdict(int)
        self._threads: dict[Hashable, queue.SimpleQueue[Callable[[], None]]] = {}
        self._nested = threading.local()

    def install(self) -> None:
        """Replaces the calls in this process for good."""
        self._replace("isend", self._slow_send)
        for name, (argument, rounds) in _COLLECTIVES.items():
            if hasattr(dist, name):
                self._replace(name, functools.partial(self._slow_collective, argument, rounds))

    def _replace(self, name: str, slow: Callable[..., Any]) -> None:
        original = getattr(distributed_c10d, name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or getattr(self._nested, "inside", False):
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            # One public call may be made of another (an old name of a new one).
            self._nested.inside = True
            try:
                return slow(original, bound.arguments)
            finally:
                self._nested.inside = False

        # `P2POp` compares with the module's own name, users call the package's.
        setattr(distributed_c10d, name, replacement)
        setattr(dist, name, replacement)

    def _slow_send(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        target = arguments["dst"]
        if target is None:
            group = arguments["group"] or dist.group.WORLD
            target = dist.get_global_rank(group, arguments["group_dst"])  # type: ignore[arg-type]
        if not self._wires.delays_message(self._rank, target):
            return original(**arguments)
        tensor: torch.Tensor = arguments["tensor"]
        carry = self._wires.post(self._rank, target, tensor.nbytes)
        work = _DelayedWork()
        # A queue a channel keeps messages in order; one that waits for its receiver holds up none.
        channel = ("send", target, arguments.get("tag", 0))

        def deliver() -> None:
            self._free_s[channel] = carry(self._free_s[channel])
            work.complete(original(**arguments))

        self._later(channel, deliver)
        return work

    def _slow_collective(
        self, argument: str, rounds: int, original: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        members = tuple(sorted(dist.get_process_group_ranks(arguments["group"])))
        if not self._wires.delays_collective(members):
            return original(**arguments)
        tensor: torch.Tensor = arguments[_only(arguments, argument)]
        number = self._numbers[members]
        self._numbers[members] += 1
        collect = functools.partial(self._wires.collect, self._rank, members, number, tensor.nbytes, rounds)
        started = original(**arguments)
        work = _DelayedWork()

        def finish() -> None:
            if started is not None:
                started.wait()
            collect()
            work.complete()

        # Those of one group end in order; one that waits for its members holds up no other group's.
        self._later(("collectives", members), finish)
        if arguments["async_op"]:
            return work
        work.wait()
        return None

    def _later(self, name: Hashable, task: Callable[[], None]) -> None:
        """Runs a task in order on a thread of that name."""
        if name not in self._threads:
            self._threads[name] = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._threads[name],), daemon=True).start()
        self._threads[name].put(task)

    def _serve(self, tasks: queue.SimpleQueue[Callable[[], None]]) -> None:
        self._nested.inside = True
        while True:
            tasks.get()()


def _only(arguments: dict[str, Any], prefix: str) -> str:
    """The one argument whose name begins so: `output`, or `output_tensor` in older versions."""
    (name,) = (name for name in arguments if name.startswith(prefix))
    return name


def sleep_until(time_s: float) -> None:
    """Sleeps until a monotonic time."""
    time.sleep(max(0.0, time_s - time.monotonic()))
