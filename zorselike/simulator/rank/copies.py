"""Copies between one rank's device and its host, and who waits for them.

Follows `zorselike/runtime/{shards,mirror,optimizer_state,gradients,stash,departures}.py`. Memory that is
given up belongs to the lane that allocated it, which waits for its last use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from zorselike.cost.step_costs import StepCosts
from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action, Kind
from zorselike.simulator.rank.labels import Notes
from zorselike.simulator.rank.streams import Lane, Lanes
from zorselike.simulator.rank.tasks import NOTHING, Tasks, Work
from zorselike.simulator.result import Track

COPIES_IN_FLIGHT = 2
"""As in `zorselike/runtime/memory/activation_offload.py`."""


class HostCopies:
    """Where a rank's shards, optimizer state, gradients and activations are, and what moves them."""

    def __init__(
        self, plan: Plan, rank: int, costs: StepCosts, tasks: Tasks, lanes: Lanes, notes: Notes | None
    ) -> None:
        self._rank, self._costs, self._tasks, self._lanes, self._notes = rank, costs, tasks, lanes, notes
        self._sizes = costs.sizes[rank]
        self._rows = [microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank)]
        self._gathered_by_schedule = plan.groups[plan.group_of_rank[rank]].zero in (1, 2)
        self._bundles: dict[tuple[float, bool], int] = {}
        self._away: set[int] = set()
        """Ministages whose shards an update must find room for."""
        self._loaded: dict[int, int] = {}
        """Of a ministage's shards the copy to the device, until somebody has waited for it."""
        self._homes: dict[int, Lane] = {}
        """On which lane a ministage's shards were allocated."""
        self._updated: dict[int, int] = {}
        self._changed: set[int] = set()
        """Ministages whose shards are newer than their host copies."""
        self._left: dict[tuple[str, int], int] = {}
        """The last copy to the host, of shards, of state and of gradients."""
        self._loaded_for_update: dict[int, list[int]] = {}
        self._leaving: dict[str, tuple[Lane, int]] = {}
        """Shards, and state, whose memory is given up once the next ones leave."""
        self._retired: list[tuple[Lane, int]] = []
        self._gradient_homes: dict[int, Lane] = {}
        self._stashed: dict[tuple[int, int], int] = {}
        self._fetched: dict[tuple[int, int], int] = {}
        self._leaving_activations: deque[int] = deque()

    def read(self, action: Action, i: int) -> None:
        """Enters the copies of an action."""
        if action.microbatch is None:
            _READERS[action.kind](self, i)
        elif action.kind is Kind.LOAD:
            self._load_activations(i, action.microbatch)
        else:
            self._offload_activations(i, action.microbatch)

    def copy(self, lane: Lane, num_bytes: float, *, to_device: bool) -> int:
        """A copy on a lane."""
        key = (num_bytes, to_device)
        if key not in self._bundles:
            flow = self._costs.network.copy(self._rank, num_bytes, to_device=to_device)
            self._bundles[key] = self._tasks.bundle_of((flow,))
        return lane.work(Work.TO_DEVICE if to_device else Work.TO_HOST, bundle=self._bundles[key])

    def _noted(self, lane: Lane, num_bytes: float, *, to_device: bool) -> int:
        if not num_bytes:
            return lane.record()
        task = self.copy(lane, num_bytes, to_device=to_device)
        if self._notes is not None:
            track: Track = "to device" if to_device else "to host"
            self._notes.add(track, task)
        return task

    # -- parameter shards ------------------------------------------------------------------

    def _shard_bytes(self, i: int) -> int:
        return self._sizes[i].shard_bytes - self._sizes[i].kept_shard_bytes

    def _load_shards(self, i: int) -> None:
        load = self._lanes.load
        load.join(self._last_store("shards", i))
        self._loaded[i] = self._noted(load, self._shard_bytes(i), to_device=True)
        self._homes[i] = load
        self._away.discard(i)

    def _offload_shards(self, i: int) -> None:
        lanes = self._lanes
        home = self._homes.pop(i, lanes.load)
        self._away.add(i)
        if i not in self._changed:
            readers = lanes.gather if self._gathered_by_schedule else lanes.compute
            home.join(readers.record())
            return
        self._changed.remove(i)
        lanes.store.join(self._updated[i])
        self._left["shards", i] = self._noted(lanes.store, self._shard_bytes(i), to_device=False)
        self._depart("shards", home, self._left["shards", i])

    def gather_shards(self, i: int) -> None:
        """The gathering lane waits for them."""
        self._lanes.gather.join(self._loaded.get(i, NOTHING))

    def await_shards(self, i: int) -> None:
        """Where FSDP2 itself gathers, the host waits for them too."""
        if not self._gathered_by_schedule and i in self._loaded:
            task = self._loaded.pop(i)
            self._lanes.compute.join(task)
            self._lanes.host.join(task)

    def _last_store(self, what: str, i: int) -> int:
        """The last copy to the host of a ministage's; of the step before, if this one had none yet."""
        return self._left.get((what, i), self._tasks.carry((self._rank, what, i)))

    def _depart(self, what: str, home: Lane, gone: int) -> None:
        self._give_up(what)
        self._leaving[what] = (home, gone)

    def _give_up(self, what: str) -> None:
        """What left before is gone."""
        if what in self._leaving:
            home, gone = self._leaving.pop(what)
            home.join(gone)

    # -- updates, their state and gradients ------------------------------------------------

    def begin_update(self, i: int) -> None:
        """The updating lane waits for gradients, state and shards."""
        self.settle_retired()
        update = self._lanes.update
        update.join(self._lanes.compute.record())
        for task in self._loaded_for_update.pop(i, ()):
            update.join(task)
        if i in self._away:
            self._homes[i] = update
            self._away.discard(i)
        update.join(self._loaded.get(i, NOTHING))

    def end_update(self, i: int, updated: int) -> None:
        self._updated[i] = updated
        self._changed.add(i)
        self._retired.append((self._gradient_homes.pop(i, self._lanes.compute), updated))

    def await_update(self, i: int) -> None:
        """Compute waits for it."""
        self._lanes.compute.join(self._updated.get(i, NOTHING))

    def settle_retired(self) -> None:
        """Gradients that were used up are given back."""
        for home, last_use in self._retired:
            home.join(last_use)
        self._retired.clear()

    def _load_state(self, i: int) -> None:
        load = self._lanes.load_state
        load.join(self._last_store("state", i))
        task = self._noted(load, self._sizes[i].state_bytes, to_device=True)
        self._loaded_for_update.setdefault(i, []).append(task)

    def _offload_state(self, i: int) -> None:
        store = self._lanes.store
        store.join(self._updated[i])
        self._left["state", i] = self._noted(store, self._sizes[i].state_bytes, to_device=False)
        self._depart("state", self._lanes.load_state, self._left["state", i])

    def _load_gradients(self, i: int) -> None:
        load = self._lanes.load_state
        load.join(self._left.get(("gradients", i), NOTHING))
        task = self._noted(load, self._sizes[i].gradient_shard_bytes, to_device=True)
        self._loaded_for_update.setdefault(i, []).append(task)
        self._gradient_homes[i] = load

    def _offload_gradients(self, i: int) -> None:
        store = self._lanes.store
        store.join(self._lanes.compute.record())
        self._left["gradients", i] = self._noted(store, self._sizes[i].gradient_shard_bytes, to_device=False)
        self._retired.append((self._lanes.compute, self._left["gradients", i]))

    # -- activations -----------------------------------------------------------------------

    def _activation_bytes(self, i: int, m: int) -> int:
        return self._rows[m] * self._sizes[i].activation_bytes_per_row

    def _offload_activations(self, i: int, m: int) -> None:
        stash = self._lanes.stash
        while len(self._leaving_activations) >= COPIES_IN_FLIGHT:
            self._let_go()
        stash.join(self._lanes.compute.record())
        task = self._noted(stash, self._activation_bytes(i, m), to_device=False)
        self._stashed[i, m] = task
        self._leaving_activations.append(task)

    def _let_go(self) -> None:
        """Compute waits for the oldest that leaves: its memory is wanted."""
        self._lanes.compute.join(self._leaving_activations.popleft())

    def _load_activations(self, i: int, m: int) -> None:
        if self._leaving_activations:
            self._let_go()
        fetch = self._lanes.fetch
        fetch.join(self._stashed.pop((i, m)))
        self._fetched[i, m] = self._noted(fetch, self._activation_bytes(i, m), to_device=True)

    def await_activations(self, i: int, m: int) -> None:
        """Before a backward."""
        self._lanes.compute.join(self._fetched.get((i, m), NOTHING))

    def drop_activations(self, i: int, m: int) -> None:
        """After it."""
        if self._fetched.pop((i, m), NOTHING) != NOTHING:
            self._lanes.fetch.join(self._lanes.compute.record())

    # -- the end ---------------------------------------------------------------------------

    def finish(self) -> None:
        """What left is given up; copies to the host go on beside the next step."""
        for what in ("shards", "state"):
            self._give_up(what)
        self.settle_retired()
        while self._leaving_activations:
            self._let_go()
        for (what, i), task in self._left.items():
            if what != "gradients":
                self._tasks.fill((self._rank, what, i), task)


_READERS: dict[Kind, Callable[[HostCopies, int], None]] = {
    Kind.LOAD: HostCopies._load_shards,
    Kind.OFFLOAD: HostCopies._offload_shards,
    Kind.LOAD_STATE: HostCopies._load_state,
    Kind.OFFLOAD_STATE: HostCopies._offload_state,
    Kind.LOAD_GRAD: HostCopies._load_gradients,
    Kind.OFFLOAD_GRAD: HostCopies._offload_gradients,
}
"""Of copies without a microbatch."""
