"""When each microbatch of a step is computed where groups go backward before all is forward.

The order is the schedule's own (`schedule/orders/in_flight.py`); seconds are each group's own. A group is one
worker, and what it sends to another shares the wires with nothing but what else it sends there.
"""

from __future__ import annotations

from collections.abc import Sequence

from zorselike.planner.estimate.forward_first import (
    Clock,
    StepWork,
    Work,
    Worker,
    microbatch_with_zero_3,
    update,
)
from zorselike.planner.estimate.rounds import Step


def run_step_in_flight(step: StepWork, order: Sequence[Step], clocks: Sequence[Clock]) -> None:
    """One step, from where each group is."""
    seconds: list[float] = []
    """Of a microbatch, forward and backward of each ministage."""
    sends: list[float] = []
    """What its results take to the next ministage; 0 where there is none."""
    wires: list[int] = []
    """Which wires these pass: those from one group to another."""
    gathered: list[float] = []
    """No microbatch ends before this, for each ministage both ways."""
    ready: list[float] = []
    """From when on each group can compute."""
    for clock in clocks:
        begin = clock.compute = clock.reduce = clock.update = clock.end
        clock.before = clock.collective = begin
        ready.append(begin)
    last = len(step.works) - 1
    is_first = [True] * len(clocks)
    for i, work in enumerate(step.works):
        g = step.owners[i]
        worker, clock = step.workers[g], clocks[g]
        if worker.zero in (1, 2) and work.gather_s > 0:
            if is_first[g]:
                ready[g] += work.first_unit * work.gather_s
            clock.collective += work.gather_s
        is_first[g] = False
        gathered += (clock.collective, clock.collective)
        seconds += (
            _microbatch_s(worker, work, forward=True),
            _microbatch_s(worker, work, forward=False),
        )
        number = worker.microbatches_per_device
        sends.append(step.sends[i + 1].seconds / number if i < last else 0.0)
        sends.append(step.returns[i].seconds / number if i > step.lowest_backward else 0.0)
        wires += (
            g * len(clocks) + step.owners[min(i + 1, last)],
            g * len(clocks) + step.owners[max(i - 1, 0)],
        )
    ended = _run(order, seconds, sends, wires, ready, gathered)
    for clock, computed in zip(clocks, ready, strict=True):
        clock.compute = computed
    if len(step.works) == len(step.workers):
        _reduce_alone(step, clocks)
    else:
        _reduce_in_turn(step, clocks, ended)
    if step.defers:
        step.update_together(clocks)


def _reduce_alone(step: StepWork, clocks: Sequence[Clock]) -> None:
    """With one ministage a group nothing is left to hide its reduction."""
    for i in range(step.lowest_backward, len(step.works)):
        worker, work, clock = step.workers[i], step.works[i], clocks[i]
        if worker.reduces_beside or (worker.zero != 3 and worker.num_reductions == 1):
            clock.compute += work.reduce_s
            clock.reduce = clock.compute
        if not step.defers:
            update(worker, work, clock, i)


def _reduce_in_turn(step: StepWork, clocks: Sequence[Clock], ended: Sequence[float]) -> None:
    """With several the deepest are done first, and their reductions run beside what the others still do."""
    computed = [clock.compute for clock in clocks]
    for i in range(len(step.works) - 1, step.lowest_backward - 1, -1):
        g = step.owners[i]
        worker, work, clock = step.workers[g], step.works[i], clocks[g]
        clock.compute = max(ended[2 * i + 1], clock.reduce)
        if worker.reduces_beside or (worker.zero != 3 and worker.num_reductions == 1):
            clock.compute += work.reduce_s
            if not worker.reduces_beside:  # What follows waits.
                computed[g] += work.reduce_s
        clock.reduce = reduced = clock.compute
        if not step.defers:
            update(worker, work, clock, i)
            computed[g] += clock.compute - reduced
    for clock, seconds in zip(clocks, computed, strict=True):
        clock.compute = max(clock.compute, seconds)


def _run(
    order: Sequence[Step],
    seconds: Sequence[float],
    sends: Sequence[float],
    wires: Sequence[int],
    ready: list[float],
    gathered: Sequence[float],
) -> list[float]:
    """Runs a step; `ready` is then when each group has computed all, and what is returned when each ministage
    has either way. A candidate has thousands of such, so nothing here is called."""
    sent = [0.0] * (len(ready) * len(ready))
    """When the last results over each wire had reached the next group."""
    ended = [0.0] * len(seconds)
    arrived: list[float] = []
    for group, way, awaited in order:
        time = ready[group]
        if awaited >= 0 and arrived[awaited] > time:
            time = arrived[awaited]
        time += seconds[way]
        if time < gathered[way]:
            time = gathered[way]
        ready[group] = ended[way] = time
        wire = wires[way]
        if sent[wire] > time:
            time = sent[wire]
        time += sends[way]
        sent[wire] = time
        arrived.append(time)
    return ended


def _microbatch_s(worker: Worker, work: Work, *, forward: bool) -> float:
    """A microbatch's computation with the collectives that nothing hides."""
    if worker.zero == 3:
        return microbatch_with_zero_3(worker, work, is_forward=forward)
    seconds = (work.forward_s if forward else work.backward_s) / worker.microbatches_per_device
    if not forward and worker.num_reductions > 1:
        return max(seconds, work.reduce_s) if worker.reduces_beside else seconds + work.reduce_s
    return seconds
