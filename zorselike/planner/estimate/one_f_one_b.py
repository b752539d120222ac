"""When each microbatch of a step is computed where groups go backward before all is forward.

The order is the schedule's own (`schedule/orders/in_flight.py`); seconds are each group's own. A group is one
worker, and what it sends on shares the wire with nothing but itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zorselike.planner.estimate.forward_first import Clock, StepWork, Work, Worker, update
from zorselike.schedule.actions import Kind
from zorselike.schedule.orders.in_flight import Computation


class Order(NamedTuple):
    """What a group computes in turn."""

    computations: Sequence[Computation]
    forward_needs: Sequence[int]
    """The last microbatch of the group before that each microbatch waits for; `()` for the first
    group."""
    backward_needs: Sequence[int]
    """Likewise of the group behind."""


@dataclass
class _Stage:
    """A group with its ministage, while a step goes on."""

    order: Order
    forward_s: float
    """Forward of a microbatch."""
    backward_s: float
    ready_s: float
    """From when on it can compute."""
    gathered_s: float
    """No microbatch ends before this."""
    send_forward_s: float = 0.0
    """What a microbatch's results take to the next group; 0 for the last."""
    send_backward_s: float = 0.0
    forward_arrivals: list[float] = field(default_factory=list)
    """When the results of each microbatch have reached the next group."""
    backward_arrivals: list[float] = field(default_factory=list)
    position: int = 0
    """In its order."""


def run_step_in_flight(step: StepWork, orders: Sequence[Order], clocks: Sequence[Clock]) -> None:
    """One step of groups that have a ministage each, from where each group is."""
    stages = []
    for i, (worker, work, clock) in enumerate(zip(step.workers, step.works, clocks, strict=True)):
        begin = clock.compute = clock.update = clock.end
        clock.before = begin
        gathers = worker.zero in (1, 2) and work.gather_s > 0
        sends = [seconds / worker.microbatches_per_device for seconds in step.sends[i : i + 2]]
        stages.append(
            _Stage(
                order=orders[i],
                forward_s=_microbatch_s(worker, work, forward=True),
                backward_s=_microbatch_s(worker, work, forward=False),
                ready_s=begin + gathers * work.first_unit * work.gather_s,
                gathered_s=begin + gathers * work.gather_s,
                send_forward_s=sends[1] if i + 1 < len(step.sends) else 0.0,
                send_backward_s=sends[0] if i > step.lowest_backward else 0.0,
            )
        )
    _run_stages(stages)
    for clock, stage in zip(clocks, stages, strict=True):
        clock.compute = stage.ready_s
    for i in range(step.lowest_backward, len(step.works)):
        worker, work, clock = step.workers[i], step.works[i], clocks[i]
        if worker.zero != 3 and worker.num_reductions == 1:
            clock.compute += work.reduce_s
        if not step.defers:
            update(worker, work, clock, i)
    if step.defers:
        step.update_together(clocks)


def _run_stages(stages: Sequence[_Stage]) -> None:
    """Runs a step; `ready_s` is then when each group has computed all."""
    before: list[int] = []
    while (now := [stage.position for stage in stages]) != before:
        before = now
        for i, stage in enumerate(stages):
            _go_on(stages, i, stage)
    assert all(stage.position == len(stage.order.computations) for stage in stages), (
        "orders wait for each other"
    )


def _go_on(stages: Sequence[_Stage], i: int, stage: _Stage) -> None:
    """Computes until something has not arrived."""
    while stage.position < len(stage.order.computations):
        kind, m = stage.order.computations[stage.position]
        is_forward = kind is Kind.F
        arrived_s = 0.0
        if needs := stage.order.forward_needs if is_forward else stage.order.backward_needs:
            other = stages[i - 1 if is_forward else i + 1]
            arrivals = other.forward_arrivals if is_forward else other.backward_arrivals
            if needs[m] >= len(arrivals):
                return
            arrived_s = arrivals[needs[m]]
        seconds = stage.forward_s if is_forward else stage.backward_s
        stage.ready_s = max(stage.gathered_s, max(stage.ready_s, arrived_s) + seconds)
        if is_forward:
            _send(stage.forward_arrivals, stage.ready_s, stage.send_forward_s)
        else:
            _send(stage.backward_arrivals, stage.ready_s, stage.send_backward_s)
        stage.position += 1


def _send(arrivals: list[float], now: float, seconds: float) -> None:
    arrivals.append(max(now, arrivals[-1] if arrivals else 0.0) + seconds)


def _microbatch_s(worker: Worker, work: Work, *, forward: bool) -> float:
    """A microbatch's computation with the collectives that nothing hides."""
    seconds = (work.forward_s if forward else work.backward_s) / worker.microbatches_per_device
    if worker.zero == 3:
        beside_s = work.gather_s + (0.0 if forward else work.reduce_s)
        if worker.is_cpu:
            return seconds + beside_s
        return max(seconds, beside_s) + work.first_unit * beside_s
    if not forward and worker.num_reductions > 1:
        seconds += work.reduce_s
    return seconds
