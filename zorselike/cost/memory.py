"""What one rank's memory holds while its actions run, by purpose: a walk over its list.

The walk is an upper bound on what the runtime holds, in bytes that tensors ask for (an allocator's
rounding and gaps are not in it). Where it cannot know, it assumes the worse:

- What is written back (shards after an update, optimizer state, gradients) is freed once the copy is
  over, and nobody waits for that: of each kind one ministage, the newest, counts until the next one
  is written back or it is loaded again. Shards that are the same on the host are freed at once. Of
  offloaded activations the two newest microbatches count; each backward and each load lets one go.
- Whole gradients go with their reduction. Where that runs beside what follows (`schedule/contract.py`) they
  count until the next reduction.
- Gradients that an update has used up count until the next update, reduction or gradients loaded.
- What an action adds is there before it frees anything. All copies are over when a step ends.
- What a rank sends to another group is kept until the step ends, as Gloo keeps it; with `num_sends_kept`
  the newest so many computations' (NCCL gives a tensor back once it has left). What it receives counts
  from its post. Over host memory (`by_host`) both have buffers there, rounded up to powers of two.
- Parameters gathered without an action (ZeRO 0) stay until the reduction; what a step leaves gathered,
  the next one finds.
- Buffers that come and go inside an action are the "working set": a microbatch's internals, a unit's
  gradients in the compute dtype until they are added up, FSDP2's buffers for reductions and gathers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from zorselike.cost.purposes import MemoryWalk, Purpose
from zorselike.cost.sizes import MinistageBytes
from zorselike.plan.pieces import count_communicators, positions_of
from zorselike.plan.plan import Plan
from zorselike.schedule.actions import (
    COMPUTE,
    NEEDED_BY,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    Edge,
    Kind,
    edge_of,
    edges_of_rank,
)
from zorselike.schedule.checker.rendezvous import find_wrapping
from zorselike.schedule.contract import MOST_DIRECT_EDGES, reduces_beside
from zorselike.schedule.copies_in_flight import CopiesInFlight

REDUCTION_BUFFERS = 1
"""Copies of a unit's gradients from which FSDP2 reduces."""
REDUCTION_BUFFERS_ALONE = 2
"""On a rank alone, where it divides by one into another."""

ZERO3_UNITS = 2
"""FSDP units gathered at once with ZeRO 3: the one that computes and the one ahead."""


def walk_memory(
    plan: Plan,
    rank: int,
    actions: Sequence[Action],
    sizes: Mapping[int, MinistageBytes],
    *,
    context_bytes: int = 0,
    num_sends_kept: int | None = None,
    on_gpu: bool = False,
    by_host: Collection[Edge] | None = None,
    communicator_bytes: int = 0,
) -> MemoryWalk:
    """What `rank` holds while it runs `actions`, a step or an evaluation that has passed `check`.

    Args:
        sizes: of each of the rank's ministages.
        context_bytes: what is on the device whatever the rank does, such as the CUDA context.
        num_sends_kept: of how many computations, the newest, what is sent is still held; None: of all.
        on_gpu: whether reductions may run beside what follows, and rows may travel over host memory.
        by_host: edges on which they do; None: those that lead back (`find_wrapping`).
        communicator_bytes: of each communicator of a GPU's rank: one an edge, and those of its group.
    """
    staged = (find_wrapping(plan, rank, actions) if by_host is None else by_host) if on_gpu else None
    walk = _Walk(plan, rank, actions, sizes, num_sends_kept, staged, communicator_bytes * on_gpu)
    began = walk.holding
    walk.run()
    if walk.holding != began:  # What a step leaves for the next one.
        walk.start_recording()
        walk.run()
    return walk.report(context_bytes)


_Entry = tuple[str, Kind, int, int]
"""What it is (kept, passed on, sent, leaving), the computation it belongs to, ministage, microbatch."""


class _Walk:
    """The device of one rank, one action after the other."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        actions: Sequence[Action],
        sizes: Mapping[int, MinistageBytes],
        num_sends_kept: int | None,
        staged: Collection[Edge] | None,
        communicator_bytes: int,
    ) -> None:
        """`staged`: edges over host memory; None on a CPU rank."""
        group = plan.groups[plan.group_of_rank[rank]]
        own = plan.ministages_of_rank(rank)
        self._actions, self._own = actions, own
        self._sizes = {i: sizes[i] for i in own}
        self._rows = tuple(microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank))
        first, last = positions_of(group.replica_of(rank), rank, plan.sequence_length or 1)
        self._num_positions = last - first
        self._zero = group.zero
        self._is_alone = len(group.flat_ranks) == 1
        self._reduces_beside = reduces_beside(
            group.zero, len(group.flat_ranks), overlap=group.overlap_grad_reduce, on_gpu=staged is not None
        )
        self._reducing_bytes = 0
        """Whole gradients that the newest reduction may still read."""
        self._computed = {(a.kind, a.ministage, a.microbatch) for a in actions if a.kind in COMPUTE}
        received = (a for a in actions if a.kind in RECEIVES)
        self._pieces = Counter((NEEDED_BY[a.kind], a.ministage, a.microbatch) for a in received)
        self._sent = {(a.kind, a.ministage, a.microbatch) for a in actions if a.kind in SENDS}
        self._away = {
            Purpose.PARAMETER_SHARDS: frozenset(own[1:] if "params" in group.offload else ()),
            Purpose.OPTIMIZER_STATE: frozenset(own if "optimizer" in group.offload else ()),
            Purpose.GRADIENT_SHARDS: frozenset(
                a.ministage or 0 for a in actions if a.kind is Kind.OFFLOAD_GRAD
            ),
        }
        """Ministages that have a host copy."""
        self._held: dict[Purpose, dict[int, int]] = {purpose: {} for purpose in Purpose}
        """By ministage; activations are in `_activations`."""
        self._activations: dict[_Entry, int] = {}
        self._totals: dict[Purpose, int] = dict.fromkeys(Purpose, 0)
        self._all_bytes = 0
        """Their sum."""
        self._leaving: dict[Purpose, int] = {}
        """The ministage that was written back, or whose gradients were used up, last."""
        self._leaving_microbatches: CopiesInFlight[_Entry] = CopiesInFlight()
        self._on_their_way: deque[_Entry] = deque()
        """What is sent and not given back yet, by age."""
        self._num_sends_kept = num_sends_kept
        self._updated: set[int] = set()
        """Ministages whose shards are newer than their host copies."""
        self._rank, self._staged, self._host_buffers = rank, staged or (), 0
        edges = edges_of_rank(rank, actions)
        num_direct = min(len(edges.difference(self._staged)), MOST_DIRECT_EDGES)
        num_communicators = num_direct + count_communicators(group, rank)
        self._buffers: dict[_Entry, int] = {}
        self._on_host: dict[tuple[int, int], int] = {}
        self._host_activations = 0
        self._peaks = dict(self._totals)
        self._hold(Purpose.COMMUNICATION, num_communicators * communicator_bytes)
        self._begin()
        self.start_recording()

    def _begin(self) -> None:
        """What the first step finds."""
        for ministage in self._own:
            if ministage not in self._away[Purpose.OPTIMIZER_STATE]:
                self._put(Purpose.OPTIMIZER_STATE, ministage, self._sizes[ministage].state_bytes)
            if ministage in self._away[Purpose.PARAMETER_SHARDS]:
                self._hold(Purpose.PARAMETER_SHARDS, self._sizes[ministage].kept_shard_bytes)
            else:
                self._put(Purpose.PARAMETER_SHARDS, ministage, self._sizes[ministage].shard_bytes)

    @property
    def holding(self) -> object:
        """What a step that begins now finds."""
        held = {purpose: dict(own) for purpose, own in self._held.items()}
        newer = self._updated & self._away[Purpose.PARAMETER_SHARDS]
        return held, dict(self._activations), dict(self._leaving), newer, dict(self._on_host)

    # -- what is recorded ------------------------------------------------------------------

    def start_recording(self) -> None:
        """Forgets all peaks so far."""
        self._peaks = dict(self._totals)
        self._working_peak = 0
        self._host_peak = self._host_buffers_peak = 0
        self._device_bytes: list[int] = []
        self._peak = -1
        self._peak_position: int | None = None
        self._at_peak = dict(self._totals)
        self._holders: dict[Purpose, tuple[int, ...]] = {}

    def run(self) -> None:
        """One step."""
        for position, action in enumerate(self._actions):
            working = self._add(action)
            during = self._all_bytes + working
            if working > self._working_peak:
                self._working_peak = working
            if during > self._peak:
                self._note_peak(position, working)
            self._remove(action)
            after = self._all_bytes
            if after > self._peak:
                self._note_peak(position, 0)
            self._device_bytes.append(during if during > after else after)
        for purpose in Purpose:
            self._settle(purpose)
        self._settle_reduction()
        sent = (entry for entry in self._activations if entry[0] == "sent")
        self._drop_all([*self._leaving_microbatches.take_all(), *sent])
        self._on_their_way.clear()

    def _note_peak(self, position: int, working: int) -> None:
        """The device has never held as much; `working` come and go with the action."""
        self._peak, self._peak_position = self._all_bytes + working, position
        self._at_peak = self._totals | {Purpose.WORKING_SET: working}
        self._holders = {purpose: tuple(own) for purpose, own in self._held.items() if own}

    def report(self, context_bytes: int) -> MemoryWalk:
        host: dict[Purpose, int] = dict.fromkeys(Purpose, 0)
        for purpose, ministages in self._away.items():
            host[purpose] = sum(self._size(purpose, ministage) for ministage in ministages)
        host[Purpose.ACTIVATIONS] = self._host_peak
        host[Purpose.COMMUNICATION] = self._host_buffers_peak
        position = self._peak_position
        return MemoryWalk(
            device=self._peaks | {Purpose.WORKING_SET: self._working_peak},
            host=host,
            device_bytes=tuple(num_bytes + context_bytes for num_bytes in self._device_bytes),
            at_peak=self._at_peak,
            holders={purpose: tuple(sorted(own)) for purpose, own in self._holders.items()},
            between_steps=dict(self._totals),
            context_bytes=context_bytes,
            peak_position=position,
            peak_action=None if position is None else self._actions[position],
        )

    # -- holding ---------------------------------------------------------------------------

    def _size(self, purpose: Purpose, ministage: int) -> int:
        sizes = self._sizes[ministage]
        match purpose:
            case Purpose.PARAMETER_SHARDS:
                return sizes.shard_bytes - sizes.kept_shard_bytes
            case Purpose.OPTIMIZER_STATE:
                return sizes.state_bytes
            case _:
                return sizes.gradient_shard_bytes

    def _put(self, purpose: Purpose, ministage: int, num_bytes: int) -> None:
        """Holds for a ministage what it does not hold yet."""
        held = self._held[purpose]
        if num_bytes and ministage not in held:
            held[ministage] = num_bytes
            self._hold(purpose, num_bytes)

    def _hold(self, purpose: Purpose, num_bytes: int) -> None:
        total = self._totals[purpose] + num_bytes
        self._totals[purpose] = total
        self._all_bytes += num_bytes
        if total > self._peaks[purpose]:
            self._peaks[purpose] = total

    def _free(self, purpose: Purpose, num_bytes: int) -> None:
        self._totals[purpose] -= num_bytes
        self._all_bytes -= num_bytes

    def _drop(self, purpose: Purpose, ministage: int) -> None:
        self._free(purpose, self._held[purpose].pop(ministage, 0))

    def _settle(self, purpose: Purpose) -> None:
        """What was leaving is gone."""
        if purpose in self._leaving:
            self._drop(purpose, self._leaving.pop(purpose))

    def _settle_reduction(self) -> None:
        """The newest one is over."""
        self._free(Purpose.GRADIENTS, self._reducing_bytes)
        self._reducing_bytes = 0

    def _leave(self, purpose: Purpose, ministage: int) -> None:
        """It will be gone; the one before it is."""
        self._settle(purpose)
        self._leaving[purpose] = ministage

    def _put_activations(self, entry: _Entry, num_bytes: int) -> None:
        if num_bytes:
            self._activations[entry] = self._activations.get(entry, 0) + num_bytes
            self._hold(Purpose.ACTIVATIONS, num_bytes)

    def _drop_activations(self, entry: _Entry) -> int:
        num_bytes = self._activations.pop(entry, 0)
        self._free(Purpose.ACTIVATIONS, num_bytes)
        self._host_buffers -= self._buffers.pop(entry, 0)
        return num_bytes

    def _drop_all(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            self._drop_activations(entry)

    def _put_buffer(self, entry: _Entry, action: Action, num_bytes: int) -> None:
        """The host's, of a transfer that goes over it."""
        if self._staged and num_bytes and edge_of(self._rank, action) in self._staged:
            rounded = 1 << (num_bytes - 1).bit_length()
            self._buffers[entry] = self._buffers.get(entry, 0) + rounded
            self._host_buffers += rounded
            self._host_buffers_peak = max(self._host_buffers_peak, self._host_buffers)

    def _num_rows(self, microbatch: int) -> int:
        """None for a dummy."""
        return self._rows[microbatch] if microbatch < len(self._rows) else 0

    # -- what an action brings -------------------------------------------------------------

    def _add(self, action: Action) -> int:
        """Enters what an action allocates; returns what it needs only while it runs."""
        kind, i, m = action.kind, action.ministage, action.microbatch
        if i is None:
            return 0
        sizes = self._sizes[i]
        if kind in TRANSFERS and m is not None:
            assert action.start is not None and action.stop is not None
            num_bytes = (action.stop - action.start) * sizes.boundary_bytes_per_row
            if action.positions is not None:  # Of those that the rank has, which the size is of.
                num_bytes = num_bytes * (action.positions[1] - action.positions[0]) // self._num_positions
            if kind in RECEIVES:
                entry: _Entry = ("passed on", NEEDED_BY[kind], i, m)
                self._put_activations(entry, num_bytes)
            else:
                entry = ("sent", Kind.F if kind is Kind.SEND_F else Kind.B, i, m)
            self._put_buffer(entry, action, num_bytes)
            return 0
        match kind:
            case Kind.UNSHARD:
                self._put(Purpose.GATHERED_PARAMETERS, i, sizes.gathered_bytes)
            case Kind.F if m is not None:
                return self._forward(i, m)
            case Kind.B if m is not None:
                return self._backward(i, m)
            case Kind.REDUCE_GRAD:
                self._gather_by_itself(i)
                self._settle(Purpose.GRADIENT_SHARDS)
                self._settle_reduction()
                self._put(Purpose.GRADIENTS, i, sizes.largest_unit_gradient_bytes)
                return self._reduction_bytes(i)
            case Kind.STEP:
                self._put(Purpose.PARAMETER_SHARDS, i, self._size(Purpose.PARAMETER_SHARDS, i))
                self._updated.add(i)
            case Kind.LOAD if m is not None:
                self._drop_all(self._leaving_microbatches.take_for_room())
                self._put_activations(("kept", Kind.F, i, m), self._on_host.get((i, m), 0))
            case Kind.LOAD | Kind.LOAD_STATE | Kind.LOAD_GRAD:
                purpose = _MOVED[kind]
                if self._leaving.get(purpose) == i:
                    del self._leaving[purpose]
                if kind is Kind.LOAD_GRAD:
                    self._settle(purpose)
                self._put(purpose, i, self._size(purpose, i))
        return 0

    def _forward(self, i: int, m: int) -> int:
        sizes, rows = self._sizes[i], self._num_rows(m)
        self._gather_by_itself(i)
        if (Kind.B, i, m) in self._computed:
            self._put_activations(("kept", Kind.F, i, m), rows * sizes.activation_bytes_per_row)
        self._pass_on(Kind.F, Kind.SEND_F, i, i + 1, m)
        return rows * sizes.working_bytes_per_row + self._joining_bytes(Kind.F, i, m)

    def _backward(self, i: int, m: int) -> int:
        sizes, rows = self._sizes[i], self._num_rows(m)
        self._drop_all(self._leaving_microbatches.take_for_room())
        self._gather_by_itself(i)
        self._pass_on(Kind.B, Kind.SEND_B, i, i - 1, m)
        working = rows * sizes.working_bytes_per_row + self._joining_bytes(Kind.B, i, m)
        working += sizes.largest_unit_rounded_gradient_bytes
        if self._zero == 3:
            self._settle(Purpose.GRADIENT_SHARDS)
            self._put(Purpose.GRADIENTS, i, sizes.largest_unit_gradient_bytes)
            return working + self._reduction_bytes(i)
        self._put(Purpose.GRADIENTS, i, sizes.gradient_bytes)
        return working

    def _gather_by_itself(self, i: int) -> None:
        """ZeRO 0 and 3 gather where parameters are used."""
        sizes = self._sizes[i]
        if self._zero == 0:
            self._put(Purpose.GATHERED_PARAMETERS, i, sizes.gathered_bytes)
        elif self._zero == 3:
            units = min(ZERO3_UNITS * sizes.largest_unit_bytes, sizes.gathered_bytes)
            self._put(Purpose.GATHERED_PARAMETERS, i, units)

    def _pass_on(self, kind: Kind, send: Kind, i: int, neighbour: int, m: int) -> None:
        """What a computation gives to the next: to another group, or within the rank."""
        num_bytes = self._num_rows(m) * self._sizes[i].boundary_bytes_per_row
        if (send, i, m) in self._sent:
            self._put_activations(("sent", kind, i, m), num_bytes)
            self._on_their_way.append(("sent", kind, i, m))
            while self._num_sends_kept is not None and len(self._on_their_way) > self._num_sends_kept:
                self._drop_activations(self._on_their_way.popleft())
        elif (kind, neighbour, m) in self._computed:
            self._put_activations(("passed on", kind, neighbour, m), num_bytes)

    def _joining_bytes(self, kind: Kind, i: int, m: int) -> int:
        """Buffers inside a computation: what was received in pieces is joined; what several ranks gathered
        into a flat buffer is copied out of it."""
        is_joined = self._pieces[kind, i, m] > 1
        joined = self._activations.get(("passed on", kind, i, m), 0) if is_joined else 0
        return joined + (0 if self._is_alone else self._sizes[i].largest_unit_bytes)

    def _reduction_bytes(self, i: int) -> int:
        """Buffers of a reduction; with master weights the rounded gradients that FSDP2 leaves, and
        another set of shards if they are added to what an earlier reduction gave."""
        sizes = self._sizes[i]
        buffers = REDUCTION_BUFFERS_ALONE if self._is_alone else REDUCTION_BUFFERS
        num_bytes = buffers * sizes.largest_unit_gradient_bytes
        if sizes.masters:
            num_bytes += sizes.rounded_gradient_shard_bytes + self._held[Purpose.GRADIENT_SHARDS].get(i, 0)
        return num_bytes

    # -- what an action leaves -------------------------------------------------------------

    def _remove(self, action: Action) -> None:
        kind, i, m = action.kind, action.ministage, action.microbatch
        if i is None or kind in TRANSFERS:
            return
        match kind:
            case Kind.RESHARD:
                self._drop(Purpose.GATHERED_PARAMETERS, i)
            case Kind.F | Kind.B if m is not None:
                self._leaving_microbatches.note_computed()
                self._drop_activations(("passed on", kind, i, m))
                if kind is Kind.B:
                    self._drop_activations(("kept", Kind.F, i, m))
                    self._host_activations -= self._on_host.pop((i, m), 0)
                if self._zero == 3:
                    self._drop(Purpose.GATHERED_PARAMETERS, i)
                    if kind is Kind.B:
                        self._end_reduction(i)
            case Kind.REDUCE_GRAD:
                self._end_reduction(i)
                if self._zero == 0:
                    self._drop(Purpose.GATHERED_PARAMETERS, i)
            case Kind.STEP:
                self._leave(Purpose.GRADIENT_SHARDS, i)
            case Kind.OFFLOAD if m is not None:
                self._offload_activations(i, m)
            case Kind.OFFLOAD if i not in self._updated:
                self._drop(Purpose.PARAMETER_SHARDS, i)
            case Kind.OFFLOAD | Kind.OFFLOAD_STATE | Kind.OFFLOAD_GRAD:
                self._leave(_MOVED[kind], i)
                if kind is Kind.OFFLOAD:
                    self._updated.remove(i)

    def _end_reduction(self, i: int) -> None:
        if self._reduces_beside:
            self._reducing_bytes = self._held[Purpose.GRADIENTS].pop(i, 0)
        else:
            self._drop(Purpose.GRADIENTS, i)
        self._put(Purpose.GRADIENT_SHARDS, i, self._sizes[i].gradient_shard_bytes)

    def _offload_activations(self, i: int, m: int) -> None:
        self._drop_all(self._leaving_microbatches.take_before_another())
        num_bytes = self._drop_activations(("kept", Kind.F, i, m))
        leaving: _Entry = ("leaving", Kind.F, i, m)
        self._put_activations(leaving, num_bytes)
        self._leaving_microbatches.add(leaving)
        self._on_host[i, m] = num_bytes
        self._host_activations += num_bytes
        self._host_peak = max(self._host_peak, self._host_activations)


_MOVED: dict[Kind, Purpose] = {
    Kind.LOAD: Purpose.PARAMETER_SHARDS,
    Kind.OFFLOAD: Purpose.PARAMETER_SHARDS,
    Kind.LOAD_STATE: Purpose.OPTIMIZER_STATE,
    Kind.OFFLOAD_STATE: Purpose.OPTIMIZER_STATE,
    Kind.LOAD_GRAD: Purpose.GRADIENT_SHARDS,
    Kind.OFFLOAD_GRAD: Purpose.GRADIENT_SHARDS,
}
"""What a copy without a microbatch moves."""
