"""After each k-th step the state is in host memory twice: on its own rank, and on another node.

A rank's own copy is what it goes back to, since updates take place as soon as gradients are there; the mirror
replaces it if it is lost. Two steps are held of each, because one is not whole while it is on its way. With
k = 1 a step is over when its mirrors are whole, so that nothing is lost; with a larger k mirrors are sent
beside the steps that follow, and at most k steps are lost.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from zorselike.elastic.contract import Json
from zorselike.elastic.held import Held, Origin, collect_facts, read_saved, write_saved
from zorselike.elastic.mirror_rules import choose_interval
from zorselike.elastic.wire import from_bytes, to_bytes
from zorselike.errors import ClusterError, ConfigError
from zorselike.runtime.checkpoints import Stateful
from zorselike.runtime.comm.device_thread import DeviceThread
from zorselike.runtime.memory.memory import HostPool, Ledger, Memory
from zorselike.runtime.memory_report import MemoryLine, MemoryReport
from zorselike.runtime.state.exchange import GroupChannel
from zorselike.runtime.state.save import describe_optimizers
from zorselike.runtime.state.snapshot import Saved, Snapshot, measure
from zorselike.simulator.mirrors import assign_mirrors

OWN = "copies of its own state"
FROZEN = "copies of its frozen weights"
MIRRORS = "mirrors of other ranks' state"
_NUM_MEASURED = 5
"""Of so many mirrors in a row the median says how long one takes."""


class Replicas:
    """Copies and mirrors of one generation's states, as one rank has them; collective to make."""

    def __init__(
        self,
        pipe: Stateful,
        generation: int,
        nodes: Sequence[str],
        *,
        share: float,
        interval: int | None = None,
    ) -> None:
        """`nodes`: by rank; `share`: of the time that mirrors may take, which `interval` (steps from one to
        the next) overrides."""
        assembly = pipe.assembly
        self._pipe, self._generation, self._nodes = pipe, generation, nodes
        self._share, self._given_interval = share, interval
        self._rank, self._size = assembly.ranks.rank, assembly.ranks.world_size
        group = assembly.groups.make(range(self._size), "gloo")
        assert group is not None
        self._group, self._channel = group, GroupChannel(assembly.ranks, group)
        memory = assembly.resources.memory
        self.ledger = Ledger()
        pool = HostPool(self.ledger, pin=memory.device.type == "cuda")
        self._memory = Memory(memory.device, memory.streams, pool, self.ledger)
        self._stream = memory.streams.make("replicas")
        self._thread = DeviceThread("replicas", memory.device)
        tensors = assembly.state.inventory.all_tensors
        self._frozen = {n for n, facts in tensors.items() if facts.is_parameter and not facts.trains}
        self._changing = tensors.keys() - self._frozen
        self._own_frozen: Snapshot | None = None
        """Taken once, and sent once."""
        self._is_frozen_taken = False
        self._frozen_of: dict[int, tuple[list[list[Saved]], list[Tensor]]] = {}
        """Of ranks that this one mirrors."""
        self._lock = threading.Lock()
        self._held: list[Held] = []
        self._keeps = False
        self._snapshots: dict[int, Snapshot] = {}
        """Of this rank, by step."""
        self._running: Future[None] | None = None
        self._holder_of: dict[int, int] = {}
        self._mirror_s: deque[float] = deque(maxlen=_NUM_MEASURED)
        self._step_s: deque[float] = deque(maxlen=_NUM_MEASURED)
        """Of the slowest rank, as all agree."""
        self._busy_s: deque[tuple[float, ...]] = deque()
        """Of every rank, by step; not looked at yet."""
        self._ended_s: float | None = None
        self._last_due: int | None = None
        self.interval = interval or 1
        """Steps from one mirror to the next."""
        self.mirrored: int | None = None
        """The last step that is whole everywhere."""

    @property
    def held(self) -> list[Held]:
        """What is whole here; from any thread."""
        with self._lock:
            return list(self._held)

    def keep(self) -> None:
        """From now on what is whole here stays: the next generation may be filled from any of it. From any
        thread."""
        with self._lock:
            self._keeps = True

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is to be mirrored; the same on every rank."""
        return self._last_due is None or step >= self._last_due + self.interval

    def take(
        self,
        extra: Json,
        *,
        num_calls: int = 0,
        mirrors: bool = True,
        busy: Callable[[], float] | None = None,
    ) -> None:
        """Between two steps: copies this rank's state, and, collective, has it mirrored. Waits for what was
        begun before, and for this one too if it is the first, not mirrored, or as every step is. `num_calls`:
        of schedulers that the state has in it, after this step. `busy`: asked in a thread for how long this
        rank computed in it."""
        began = time.perf_counter()
        num_steps = self._pipe.checkpoints.num_steps - (self._last_due or 0)
        step_s = 0.0 if self._ended_s is None or not num_steps else (began - self._ended_s) / num_steps
        self.wait()
        if self._given_interval is None and self._mirror_s:
            mirror_s, slowest_s = statistics.median(self._mirror_s), statistics.median(self._step_s)
            self.interval = choose_interval(mirror_s, slowest_s, self._share)
        step = self._pipe.checkpoints.num_steps
        is_new = step not in self._snapshots
        facts = self._begin(step, extra, num_calls) if is_new else None
        self._running = self._thread.submit(lambda: self._finish(step, facts, step_s, busy, mirrors=mirrors))
        if mirrors:
            self._last_due = step
        if not mirrors or self.mirrored is None or self.interval == 1:
            self.wait()
        self._ended_s = time.perf_counter()

    @property
    def step_s(self) -> float | None:
        """A step of the slowest rank; None before it is known."""
        return statistics.median(self._step_s) if self._step_s else None

    def list_busy_s(self) -> list[tuple[float, ...]]:
        """For how long every rank computed in the steps that were mirrored since this was asked."""
        return [self._busy_s.popleft() for _ in range(len(self._busy_s))]

    def report(self, report: MemoryReport) -> MemoryReport:
        """A pipeline's memory, and that of these copies in its host's."""
        peaks = {purpose: self.ledger.peak(purpose, "host") for purpose in (OWN, FROZEN, MIRRORS)}
        lines = [MemoryLine(purpose, None, None, None, peak) for purpose, peak in peaks.items()]
        return replace(
            report,
            lines=(*report.lines, *lines),
            host_peak_bytes=report.host_peak_bytes + sum(peaks.values()),
        )

    def wait(self) -> None:
        """Until what was begun is whole. Raises what went wrong: other ranks are gone."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Ends the thread, when nothing is on its way; `held` stays until `forget`."""
        self._thread.close()

    def abandon(self) -> None:
        """`close` where other ranks may be gone, whatever is on its way."""
        self._thread.abandon()

    def forget(self) -> None:
        """Gives the memory of all copies back."""
        with self._lock:
            self._held = []
        self._snapshots.clear()
        self._frozen_of.clear()
        self._memory.pool.close()

    # -- on the main thread ----------------------------------------------------------------

    def _begin(self, step: int, extra: Json, num_calls: int) -> Json:
        """Starts copying; gives what is known beside the tensors, but for the optimizers."""
        is_first = self._own_frozen is None
        if self._own_frozen is None:
            self._own_frozen = self._snapshot(self._changing, model_only=True)
        self._snapshots[step] = self._snapshot(self._frozen)
        if is_first:
            self._reserve_second(OWN, self._snapshots[step].buffers())
        assembly = self._pipe.assembly
        return collect_facts(assembly.state, self._pipe.checkpoints, extra, num_calls)

    def _reserve_second(self, purpose: str, first: Sequence[Tensor]) -> None:
        """Room for as much once more, now that nothing else runs: pinning it beside a step may wait for the
        GPU, which may wait for other ranks."""
        self._memory.pool.reserve(purpose, [buffer.numel() for buffer in first])

    def _snapshot(self, left_out: Collection[str], *, model_only: bool = False) -> Snapshot:
        purpose = FROZEN if model_only else OWN
        snapshot = Snapshot(
            self._pipe.assembly.state.ministages,
            self._memory,
            self._stream,
            model_only=model_only,
            stages=True,
            left_out=left_out,
            purpose=purpose,
        )
        if not snapshot.is_staged:
            snapshot.close()
            raise ConfigError(
                "the host has no room for a copy of this rank's state, without which nothing replaces a lost "
                "rank's: leave elasticity out there, offload less, or give this rank fewer layers"
            )
        return snapshot

    # -- in the thread ---------------------------------------------------------------------

    def _finish(
        self,
        step: int,
        facts: Json | None,
        step_s: float,
        busy: Callable[[], float] | None,
        *,
        mirrors: bool,
    ) -> None:
        if facts is not None:
            self._take_own(step, facts)
        if not mirrors:
            return
        began = time.perf_counter()
        own = next(held for held in self.held if held.origin == self._origin(step, self._rank))
        if self._size > 1:
            self._mirror(own)
        mirror_s = time.perf_counter() - began
        # All have all of this step when this is over, and only then may a step before go.
        own_s = torch.tensor(
            [mirror_s, step_s, math.nan if busy is None else busy()], dtype=torch.float64, device="cpu"
        )
        said = [torch.empty_like(own_s) for _ in range(self._size)]
        dist.all_gather(said, own_s, group=self._group)
        if self.mirrored is not None and step_s:  # The first one brings what is frozen, too.
            self._mirror_s.append(max(float(one[0]) for one in said))
            self._step_s.append(max(float(one[1]) for one in said))
        if busy is not None:
            self._busy_s.append(tuple(float(one[2]) for one in said))
        self._drop_before(step)
        self.mirrored = step

    def _take_own(self, step: int, facts: Json) -> None:
        frozen, changing = self._own_frozen, self._snapshots[step]
        assert frozen is not None
        for snapshot in (changing,) if self._is_frozen_taken else (frozen, changing):
            snapshot.take()
            if snapshot.failure is not None:
                raise snapshot.failure
        if self._pipe.assembly.groups.is_aborted:
            raise ClusterError("other ranks are gone, and what was copied is not known to be whole")
        self._is_frozen_taken = True
        optimizers = [changing.optimizer_facts(i) for i in changing.order]
        facts = {**facts, "optimizers": describe_optimizers([own for own in optimizers if own is not None])}
        saved = [snapshot.saved(i) for snapshot in (frozen, changing) for i in snapshot.order]
        buffers = [*frozen.buffers(), *changing.buffers()]
        with self._lock:
            self._held.append(Held(self._origin(step, self._rank), saved, buffers, facts))

    def _mirror(self, own: Held) -> None:
        """Sends this rank's copy to who mirrors it, and takes those of others."""
        is_first = not self._holder_of
        if is_first:
            sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self._size)]
            dist.all_gather(sizes, torch.tensor([own.num_bytes], device="cpu"), group=self._group)
            self._holder_of = assign_mirrors(self._nodes, [int(size) for size in sizes])
        num_frozen = len(self._snapshots[own.origin.step].order)
        first = 0 if is_first else num_frozen
        header = {
            "saved": [write_saved(saved) for saved in own.saved[first:]],
            "num_frozen": num_frozen if is_first else 0,
            "facts": own.facts,
        }
        text = to_bytes(header)
        contents = [torch.tensor([text.numel()], device="cpu"), text, *own.buffers[first:]]
        holder = self._holder_of[self._rank]
        waits = [self._channel.send(content, holder) for content in contents if content.numel()]
        for rank, its_holder in sorted(self._holder_of.items()):
            if its_holder == self._rank:
                self._receive(own.origin.step, rank)
        for wait in waits:
            wait()
        if is_first:
            others = [held for held in self.held if held.origin.rank != self._rank]
            kept = [buffer.data_ptr() for _, buffers in self._frozen_of.values() for buffer in buffers]
            changing = [b for held in others for b in held.buffers if b.data_ptr() not in kept]
            self._reserve_second(MIRRORS, changing)

    def _receive(self, step: int, rank: int) -> None:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._channel.receive(length, rank)
        text = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self._channel.receive(text, rank)
        header = from_bytes(text)
        saved = list(map(read_saved, header["saved"]))
        buffers = [self._memory.pool.take(MIRRORS, measure(own)) for own in saved]
        for buffer in buffers:
            if buffer.numel():
                self._channel.receive(buffer, rank)
        num_frozen = header["num_frozen"]
        if rank not in self._frozen_of:
            self._frozen_of[rank] = saved[:num_frozen], buffers[:num_frozen]
        frozen, frozen_buffers = self._frozen_of[rank]
        held = Held(
            self._origin(step, rank),
            [*frozen, *saved[num_frozen:]],
            [*frozen_buffers, *buffers[num_frozen:]],
            header["facts"],
        )
        with self._lock:
            self._held.append(held)

    def _drop_before(self, step: int) -> None:
        with self._lock:
            if self._keeps:
                return
            gone = [held for held in self._held if held.origin.step < step]
            self._held = [held for held in self._held if held.origin.step >= step]
        for held in gone:
            if held.origin.rank == self._rank:
                self._snapshots.pop(held.origin.step).close()
            else:
                kept = {buffer.data_ptr() for buffer in self._frozen_of[held.origin.rank][1]}
                for buffer in held.buffers:
                    if buffer.data_ptr() not in kept:
                        self._memory.pool.give_back(MIRRORS, buffer)

    def _origin(self, step: int, rank: int) -> Origin:
        return Origin(self._generation, step, rank, self._size)
