"""The recurrence of an estimate (`planner/estimate/step_time.py`): phase after phase of each ministage,
groups side by side."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zorselike.schedule.contract import COPIES_IN_FLIGHT

_FULL = 0.95
"""Share of wires that rows take from a gather at most."""
_NUM_CROSSINGS = 4
"""Of rows, after which a gather has long ended."""

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Worker:
    """A group, as the recurrence sees it."""

    is_cpu: bool
    zero: int
    microbatches_per_device: int
    num_reductions: int
    """Reductions of a ministage in a step."""
    overlap_slowdown: float
    reduces_beside: bool
    """Whether reductions run beside the backwards that follow them."""

    def gathers(self, *, is_forward: bool) -> bool:
        """Whether ministages are gathered whole, before their forwards or backwards."""
        return self.zero == 2 or (self.zero == 1 and is_forward)


class Crossing(NamedTuple):
    """All rows of a step over the boundary before a ministage, one way or back, in seconds."""

    seconds: float = 0.0
    at_lower: float = 0.0
    """Of these on the wires that collectives of the group before the boundary use."""
    at_upper: float = 0.0
    """Likewise of the group behind it."""


class _Passing(NamedTuple):
    """Rows on wires that a group's collectives use."""

    begin: float
    end: float
    share: float
    """Of the wires that they take."""


class Copies(NamedTuple):
    """Between a device and its host for one ministage, in seconds."""

    load_s: float = 0.0
    """Its shards from the host."""
    state_s: float = 0.0
    """Its optimizer state, one way."""
    stash_s: float = 0.0
    """Activations of all microbatches, one way."""


@dataclass(frozen=True)
class Work:
    """One ministage of a group, in seconds."""

    forward_s: float
    backward_s: float
    """All microbatches; 0 where nothing trains below."""
    gather_s: float
    first_unit: float
    """Share of the gather after which computing can begin."""
    reduce_s: float
    """Once."""
    update_s: float
    copies: Copies


@dataclass
class Clock:
    """Where a group is in time."""

    compute: float = 0.0
    collective: float = 0.0
    """Gathers, and the reductions behind them."""
    reduce: float = 0.0
    update: float = 0.0
    load: float = 0.0
    """What copies to the device, of optimizer state and activations."""
    store: float = 0.0
    """And back."""
    before: float = 0.0
    """When compute was done with the phase before the last: from then on the next gather may run."""
    shards: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """From when on a ministage's updated shards are there."""
    states: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """From when on its state may be loaded again."""
    sent: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """When another group has all that was sent to it so far."""
    reduction: tuple[float, float] | None = None
    """When the last of the step began, and what it takes alone."""
    ahead: tuple[float, float] | None = None
    """Of the ministage whose turn is next, where it was gathered before a reduction: when the first unit,
    and when all is there."""
    leaving: deque[_Passing] = field(default_factory=lambda: deque(maxlen=_NUM_CROSSINGS))
    """The last rows that went out over wires of its collectives."""
    arriving: deque[_Passing] = field(default_factory=lambda: deque(maxlen=_NUM_CROSSINGS))
    """And in."""

    @property
    def end(self) -> float:
        return max(self.compute, self.reduce, self.update)


@dataclass(frozen=True)
class StepWork:
    """One step of a candidate, in seconds."""

    owners: Sequence[int]
    """The group of each ministage."""
    workers: Sequence[Worker]
    works: Sequence[Work]
    sends: Sequence[Crossing]
    """All rows over each boundary before a ministage."""
    returns: Sequence[Crossing]
    """All gradients back over it."""
    lowest_backward: int
    """The first ministage that has a backward."""
    defers: bool
    """Whether updates wait until all gradients are there."""

    def update_together(self, clocks: Sequence[Clock]) -> None:
        """All updates, once all gradients are there."""
        everyone = max(max(clock.compute, clock.reduce) for clock in clocks)
        for clock in clocks:
            clock.compute = everyone
        for i in range(len(self.works) - 1, self.lowest_backward - 1, -1):
            g = self.owners[i]
            update(self.workers[g], self.works[i], clocks[g], i)


class _Way(NamedTuple):
    """Which ways the microbatches of a phase go; both, where each turns before the next one comes."""

    forward: bool
    backward: bool

    @property
    def turns(self) -> bool:
        return self.forward and self.backward


_FORWARD, _BACKWARD, _TURNS = _Way(True, False), _Way(False, True), _Way(True, True)


def run_step(step: StepWork, clocks: Sequence[Clock]) -> None:
    """One step, from where each group is."""
    for clock in clocks:
        clock.compute = clock.reduce = clock.update = clock.end
        clock.before = clock.compute
        clock.reduction = None
    last = len(step.works) - 1
    turning = last if step.lowest_backward <= last else None
    arrivals: Floats | None = None
    for i in range(last + 1):
        g = step.owners[i]
        way = _TURNS if i == turning else _FORWARD
        done = _run_phase(step.workers[g], step.works[i], clocks[g], i, arrivals, way)
        if i < last:
            to, crossing = step.owners[i + 1], step.sends[i + 1]
            arrivals = _send(done, crossing.seconds, clocks[g], to)
            _note_rows(done, arrivals, crossing.at_lower, clocks[g], clocks[g].leaving)
            _note_rows(done, arrivals, crossing.at_upper, clocks[to], clocks[to].arriving)
    for i in range(last, step.lowest_backward - 1, -1):
        g = step.owners[i]
        worker, work, clock = step.workers[g], step.works[i], clocks[g]
        if i != turning:
            done = _run_phase(worker, work, clock, i, arrivals, _BACKWARD)
        if i:
            to, crossing = step.owners[i - 1], step.returns[i]
            arrivals = _send(done, crossing.seconds, clock, to)
            _note_rows(done, arrivals, crossing.at_upper, clock, clock.leaving)
            _note_rows(done, arrivals, crossing.at_lower, clocks[to], clocks[to].arriving)
        if worker.zero != 3:
            below = next((j for j in range(i - 1, step.lowest_backward - 1, -1) if step.owners[j] == g), None)
            if below is not None and worker.reduces_beside:
                clock.ahead = _gather(worker, step.works[below], clock, below, is_forward=False)
            _reduce(worker, work, clock)
        if not step.defers:
            update(worker, work, clock, i)
    if step.defers:
        step.update_together(clocks)


def _run_phase(
    worker: Worker,
    work: Work,
    clock: Clock,
    ministage: int,
    arrivals: Floats | None,
    way: _Way,
) -> Floats:
    """All microbatches of a ministage one way, or each both; when each is done."""
    number = worker.microbatches_per_device
    first_s = work.forward_s if way.forward else work.backward_s
    """Until a microbatch has used all that is gathered."""
    compute_s = first_s + (work.backward_s if way.turns else 0.0)
    if worker.zero == 3:
        ways = [is_forward for is_forward, goes in zip((True, False), way, strict=True) if goes]
        compute_s = number * sum(microbatch_with_zero_3(worker, work, is_forward=own) for own in ways)
    elif worker.overlap_slowdown > 1 and worker.gathers(is_forward=way.forward):
        compute_s += (worker.overlap_slowdown - 1) * min(compute_s, work.gather_s)
    first, all_there = _gather(worker, work, clock, ministage, is_forward=way.forward)
    clock.before = clock.compute
    begin = max(clock.compute, first)
    each_s = compute_s / number
    stash_s = 0.0 if way.turns else work.copies.stash_s / number
    ready = arrivals
    if arrivals is not None and len(arrivals) != number:
        ready = arrivals[_last_needed(number, len(arrivals))]
    # The first microbatch ends when everything was gathered, or later.
    begin = max(begin, all_there - first_s / number)
    if stash_s:
        done = _run_with_copies(clock, number, begin, each_s, stash_s, ready, forward=way.forward)
    else:
        done = _chain(number, begin, each_s, ready)
    clock.compute = float(done[-1])
    return done


def _note_rows(
    done: Floats, arrivals: Floats, seconds: float, clock: Clock, passing: deque[_Passing]
) -> None:
    """That rows pass a group's wires from when they are computed until they have arrived, and hold up a
    reduction that is on its way."""
    if not seconds:
        return
    begin, end = float(done[0]), float(arrivals[-1])
    passing.append(_Passing(begin, end, min(_FULL, seconds / max(end - begin, seconds))))
    if clock.reduction is not None and begin < clock.reduce:
        clock.reduce = clock.collective = _collect_between(*clock.reduction, clock)


def _collect_between(start: float, seconds: float, clock: Clock) -> float:
    """When a gather or reduction ends that has what rows leave of the wires: they are on their way over many
    channels at once, it over one."""
    passing = [rows for rows in (*clock.leaving, *clock.arriving) if rows.end > start]
    edges = {time for rows in passing for time in (rows.begin, rows.end) if time > start}
    for edge in sorted(edges):
        left = 1 - max((rows.share for rows in passing if rows.begin <= start < rows.end), default=0.0)
        if start + seconds / left <= edge:
            return start + seconds / left
        seconds -= (edge - start) * left
        start = edge
    return start + seconds


def microbatch_with_zero_3(worker: Worker, work: Work, *, is_forward: bool) -> float:
    """Seconds of one microbatch that gathers and reduces by itself: before a forward its first unit is
    gathered, the others beside it; after a backward its last unit is reduced, and what was not while it
    computed. On a CPU nothing runs beside it."""
    seconds = (work.forward_s if is_forward else work.backward_s) / worker.microbatches_per_device
    gather_s, reduce_s = work.gather_s, 0.0 if is_forward else work.reduce_s
    if worker.is_cpu:
        return seconds + gather_s + reduce_s
    first, rest = work.first_unit, 1 - work.first_unit
    if is_forward:
        return first * (gather_s + seconds) + rest * max(gather_s, seconds)
    return max(first * (seconds + reduce_s) + rest * max(seconds, reduce_s), gather_s + reduce_s)


def _gather(
    worker: Worker, work: Work, clock: Clock, ministage: int, *, is_forward: bool
) -> tuple[float, float]:
    """When the first unit of a ministage, and when all of it is there."""
    if clock.ahead is not None:
        there, clock.ahead = clock.ahead, None
        return there
    load_s = work.copies.load_s
    if worker.gathers(is_forward=is_forward) and (work.gather_s or load_s):
        start = max(clock.collective, clock.before, clock.shards[ministage])
        clock.collective = max(start + load_s, _collect_between(start, work.gather_s, clock))
        return clock.collective - (1 - work.first_unit) * work.gather_s, clock.collective
    return (max(clock.before, clock.shards[ministage]) + load_s, 0.0) if load_s else (0.0, 0.0)


def _run_with_copies(
    clock: Clock,
    number: int,
    begin: float,
    each_s: float,
    copy_s: float,
    ready: Floats | None,
    *,
    forward: bool,
) -> Floats:
    """The same where activations leave for the host behind each microbatch, or come back before it.

    What copies wait for and what waits for them is settled in two passes: the first knows the copies that
    follow each other without a pause, the second those that microbatches hold up.
    """
    done = _chain(number, begin, each_s, ready)
    late = np.full(number, -np.inf) if ready is None else ready
    ahead = min(COPIES_IN_FLIGHT, number)
    if forward:
        copied = _chain(number, clock.store, copy_s, done)
        waits = late.copy()
        waits[ahead:] = np.maximum(late[ahead:], copied[: number - ahead])
        done = _chain(number, begin, each_s, waits)
        clock.store = float(_chain(number, clock.store, copy_s, done)[-1])
        return done
    for _ in range(2):
        free = np.full(number, clock.before)
        free[ahead:] = np.maximum(clock.before, done[: number - ahead])
        loaded = _chain(number, clock.load, copy_s, free)
        done = _chain(number, begin, each_s, np.maximum(late, loaded))
    clock.load = float(loaded[-1])
    return done


def _chain(number: int, begin: float, each_s: float, ready: Floats | None) -> Floats:
    """Ends of things that take as long as each other and follow each other, each once it is ready."""
    before: Floats = each_s * _count(number)
    if ready is None:
        return before + (begin + each_s)
    ends = ready - before
    if ends[0] < begin:
        ends[0] = begin
    np.maximum.accumulate(ends, out=ends)
    ends += before
    ends += each_s
    return ends


@cache
def _count(number: int) -> Floats:
    """0, 1, ... as many."""
    return np.arange(float(number))


@cache
def _last_needed(number: int, num_sent: int) -> Indices:
    """Of so many that were sent the last that each of so many microbatches has rows of."""
    return -(-np.arange(1, number + 1) * num_sent // number) - 1


def _reduce(worker: Worker, work: Work, clock: Clock) -> None:
    """On a device beside the next backward, once the reduction before it is over."""
    if not worker.reduces_beside:
        clock.compute += worker.num_reductions * work.reduce_s
        return
    beside_s = work.backward_s / worker.microbatches_per_device
    clock.compute += (worker.num_reductions - 1) * max(0.0, work.reduce_s - beside_s)
    clock.compute = max(clock.compute, clock.reduce)
    # Behind the gather that was launched before.
    start = max(clock.compute, clock.collective)
    clock.reduction = start, work.reduce_s
    clock.reduce = clock.collective = _collect_between(start, work.reduce_s, clock)


def _send(done: Floats, seconds: float, clock: Clock, target: int) -> Floats:
    """When each microbatch has reached the next group, behind all that was sent there before."""
    if not seconds:
        return done
    arrivals = _chain(len(done), clock.sent[target], seconds / len(done), done)
    clock.sent[target] = float(arrivals[-1])
    return arrivals


def update(worker: Worker, work: Work, clock: Clock, ministage: int) -> None:
    if worker.is_cpu:
        clock.compute += work.update_s + 2 * work.copies.state_s
        clock.shards[ministage] = clock.compute
        return
    # State is loaded during the backward and stored behind the update.
    clock.load = max(clock.load, clock.before, clock.states[ministage]) + work.copies.state_s
    reduced_s = clock.reduce if worker.reduces_beside else clock.compute
    clock.update = max(clock.update, reduced_s, clock.load) + work.update_s
    clock.store = max(clock.store, clock.update) + work.copies.state_s
    clock.states[ministage] = clock.store
    clock.shards[ministage] = clock.update
