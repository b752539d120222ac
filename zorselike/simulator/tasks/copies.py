"""Copies between one rank's device and its host, and what waits for them.

Follows `zorselike/runtime/ministage/{shards,optimizer_state,gradients}.py` and
`zorselike/runtime/memory/{host_backed,activation_offload}.py`. Memory is freed on the stream
that allocated it, after that stream has waited for its last use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from zorselike.cost.step_costs import StepCosts
from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.copies_in_flight import CopiesInFlight
from zorselike.simulator.classes.folded_network import Flows
from zorselike.simulator.tasks.graph import NOTHING, Tasks, Work
from zorselike.simulator.tasks.labels import Labels
from zorselike.simulator.tasks.streams import Stream, Streams


class HostCopies:
    """Where a rank's shards, optimizer state, gradients and activations are, and the copies of them."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        costs: StepCosts,
        tasks: Tasks,
        streams: Streams,
        labels: Labels | None,
        network: Flows,
    ) -> None:
        self._rank, self._network, self._tasks = rank, network, tasks
        self._streams, self._labels = streams, labels
        self._sizes = costs.sizes[rank]
        self._rows = [microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank)]
        self._gathered_by_schedule = plan.groups[plan.group_of_rank[rank]].zero in (1, 2)
        self._bundles: dict[tuple[float, bool], int] = {}
        self._offloaded_shards: set[int] = set()
        """Ministages whose shards an update allocates anew."""
        self._loaded: dict[int, int] = {}
        """By ministage: its shards' copy to the device, until something has waited for it."""
        self._shard_streams: dict[int, Stream] = {}
        """By ministage: the stream that allocated its shards."""
        self._updated: dict[int, int] = {}
        self._changed: set[int] = set()
        """Ministages whose shards are newer than their host copies."""
        self._stored: dict[tuple[str, int], int] = {}
        """By kind and ministage: the last copy to the host."""
        self._loaded_for_update: defaultdict[int, list[int]] = defaultdict(list)
        self._pending_frees: dict[str, tuple[Stream, int]] = {}
        """By kind: the last offloaded memory, which is freed when the next one is offloaded."""
        self._used_gradients: list[tuple[Stream, int]] = []
        self._gradient_streams: dict[int, Stream] = {}
        self._awaited: set[int] = set()
        """Ministages whose reduced gradients compute has waited for, and works on."""
        self._stored_activations: dict[tuple[int, int], int] = {}
        self._loaded_activations: dict[tuple[int, int], int] = {}
        self.activations_in_flight: CopiesInFlight[int] = CopiesInFlight()
        """Tasks, whose memory the compute stream wants again."""

    def add(self, action: Action, i: int) -> None:
        """Adds the tasks of a copy."""
        if action.microbatch is None:
            _METHODS[action.kind](self, i)
        elif action.kind is Kind.LOAD:
            self._load_activations(i, action.microbatch)
        else:
            self._offload_activations(i, action.microbatch)

    def copy(self, stream: Stream, num_bytes: float, *, to_device: bool) -> int:
        """A copy on a stream."""
        key = (num_bytes, to_device)
        if key not in self._bundles:
            flow = self._network.copy(self._rank, num_bytes, to_device=to_device)
            self._bundles[key] = self._tasks.bundle_of((flow,))
        return stream.work(Work.TO_DEVICE if to_device else Work.TO_HOST, bundle=self._bundles[key])

    def _copy_labelled(self, stream: Stream, num_bytes: float, *, to_device: bool) -> int:
        if not num_bytes:
            return stream.record()
        task = self.copy(stream, num_bytes, to_device=to_device)
        if self._labels is not None:
            self._labels.add("to device" if to_device else "to host", task)
        return task

    # -- parameter shards ------------------------------------------------------------------

    def _shard_bytes(self, i: int) -> int:
        return self._sizes[i].shard_bytes - self._sizes[i].kept_shard_bytes

    def _load_shards(self, i: int) -> None:
        load = self._streams.load
        load.wait(self._last_store("shards", i))
        self._loaded[i] = self._copy_labelled(load, self._shard_bytes(i), to_device=True)
        self._shard_streams[i] = load
        self._offloaded_shards.discard(i)

    def _offload_shards(self, i: int) -> None:
        streams = self._streams
        stream = self._shard_streams.pop(i, streams.load)
        self._offloaded_shards.add(i)
        if i not in self._changed:
            readers = streams.gather if self._gathered_by_schedule else streams.compute
            stream.wait(readers.record())
            return
        self._changed.remove(i)
        streams.store.wait(self._updated[i])
        self._free_after("shards", stream, self._store("shards", i, self._shard_bytes(i)))

    def gather_shards(self, i: int) -> None:
        """The gather stream waits for them."""
        self._streams.gather.wait(self._loaded.get(i, NOTHING))

    def await_shards(self, i: int) -> None:
        """Where FSDP2 itself gathers, which it does after what compute has been given."""
        if not self._gathered_by_schedule and i in self._loaded:
            self._streams.compute.wait(self._loaded.pop(i))

    def _store(self, kind: str, i: int, num_bytes: int) -> int:
        """Copies to the host once all is there that the stream waits for."""
        task = self._stored[kind, i] = self._copy_labelled(self._streams.store, num_bytes, to_device=False)
        return task

    def _last_store(self, kind: str, i: int) -> int:
        """The last copy to the host; the previous step's if this one had none yet."""
        return self._stored.get((kind, i), self._tasks.from_previous_step((self._rank, kind, i)))

    def _free_after(self, kind: str, stream: Stream, stored: int) -> None:
        """Memory of `stream` is to be freed after the copy `stored`; what was pending before is freed now."""
        self._free_pending(kind)
        self._pending_frees[kind] = (stream, stored)

    def _free_pending(self, kind: str) -> None:
        if kind in self._pending_frees:
            stream, stored = self._pending_frees.pop(kind)
            stream.wait(stored)

    # -- updates, their state and gradients ------------------------------------------------

    def begin_update(self, i: int) -> None:
        """The update stream waits for gradients, state and shards."""
        self.free_gradients()
        update = self._streams.update
        update.wait((self._streams.compute if i in self._awaited else self._streams.reduce).record())
        for task in self._loaded_for_update.pop(i, ()):
            update.wait(task)
        if i in self._offloaded_shards:
            self._shard_streams[i] = update
            self._offloaded_shards.discard(i)
        update.wait(self._loaded.get(i, NOTHING))

    def end_update(self, i: int, updated: int) -> None:
        self._updated[i] = updated
        self._changed.add(i)
        self._used_gradients.append((self._gradient_streams.pop(i, self._streams.reduce), updated))

    def await_reduction(self, i: int) -> None:
        """The compute stream waits for it."""
        if i not in self._awaited:
            self._awaited.add(i)
            self._streams.compute.wait(self._streams.reduce.record())

    def await_update(self, i: int) -> None:
        """The compute stream waits for it."""
        self._streams.compute.wait(self._updated.get(i, NOTHING))

    def free_gradients(self) -> None:
        """Frees gradients after their last use."""
        for stream, last_use in self._used_gradients:
            stream.wait(last_use)
        self._used_gradients.clear()

    def _load_state(self, i: int) -> None:
        self._load_for_update(i, self._last_store("state", i), self._sizes[i].state_bytes)

    def _load_for_update(self, i: int, stored: int, num_bytes: int) -> None:
        load = self._streams.load_state
        load.wait(stored)
        self._loaded_for_update[i].append(self._copy_labelled(load, num_bytes, to_device=True))

    def _offload_state(self, i: int) -> None:
        self._streams.store.wait(self._updated[i])
        stored = self._store("state", i, self._sizes[i].state_bytes)
        self._free_after("state", self._streams.load_state, stored)

    def _load_gradients(self, i: int) -> None:
        stored = self._stored.get(("gradients", i), NOTHING)
        self._load_for_update(i, stored, self._sizes[i].gradient_shard_bytes)
        self._gradient_streams[i] = self._streams.load_state

    def _offload_gradients(self, i: int) -> None:
        reduce = self._streams.reduce
        self._streams.store.wait(reduce.record())
        stored = self._store("gradients", i, self._sizes[i].gradient_shard_bytes)
        self._used_gradients.append((reduce, stored))

    # -- activations -----------------------------------------------------------------------

    def _activation_bytes(self, i: int, m: int) -> int:
        return self._rows[m] * self._sizes[i].activation_bytes_per_row

    def _offload_activations(self, i: int, m: int) -> None:
        stream = self._streams.store_activations
        self._await(self.activations_in_flight.take_before_another())
        stream.wait(self._streams.compute.record())
        task = self._copy_labelled(stream, self._activation_bytes(i, m), to_device=False)
        self._stored_activations[i, m] = task
        self.activations_in_flight.add(task)

    def _await(self, copies: Iterable[int]) -> None:
        """The compute stream waits for copies to the host: their memory is needed."""
        for task in copies:
            self._streams.compute.wait(task)

    def _load_activations(self, i: int, m: int) -> None:
        self._await(self.activations_in_flight.take_for_room())
        stream = self._streams.load_activations
        stream.wait(self._stored_activations.pop((i, m)))
        task = self._copy_labelled(stream, self._activation_bytes(i, m), to_device=True)
        self._loaded_activations[i, m] = task

    def await_activations(self, i: int, m: int) -> None:
        """Before a backward."""
        self._await(self.activations_in_flight.take_for_room())
        self._streams.compute.wait(self._loaded_activations.get((i, m), NOTHING))

    def drop_activations(self, i: int, m: int) -> None:
        """After it."""
        if self._loaded_activations.pop((i, m), NOTHING) != NOTHING:
            self._streams.load_activations.wait(self._streams.compute.record())

    # -- the end ---------------------------------------------------------------------------

    def finish(self) -> None:
        """Frees what was offloaded; copies to the host continue beside the next step."""
        for kind in ("shards", "state"):
            self._free_pending(kind)
        self.free_gradients()
        self._await(self.activations_in_flight.take_all())
        for (kind, i), task in self._stored.items():
            if kind != "gradients":
                self._tasks.to_next_step((self._rank, kind, i), task)


_METHODS: dict[Kind, Callable[[HostCopies, int], None]] = {
    Kind.LOAD: HostCopies._load_shards,
    Kind.OFFLOAD: HostCopies._offload_shards,
    Kind.LOAD_STATE: HostCopies._load_state,
    Kind.OFFLOAD_STATE: HostCopies._offload_state,
    Kind.LOAD_GRAD: HostCopies._load_gradients,
    Kind.OFFLOAD_GRAD: HostCopies._offload_gradients,
}
"""For copies without a microbatch."""
