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
    needs: tuple[Sequence[int], Sequence[int]]
    """The last microbatch of the group before that each forward waits for, `()` for the first group; and
    likewise of the group behind and each backward."""


@dataclass
class _Stage:
    """A group with its ministage, while a step goes on; pairs are for forward and backward."""

    order: Order
    seconds: tuple[float, float]
    """Of a microbatch."""
    ready_s: float
    """From when on it can compute."""
    gathered_s: float
    """No microbatch ends before this."""
    sends: tuple[float, float]
    """What a microbatch's results take to the next group; 0 where there is none."""
    arrivals: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """When the results of each microbatch have reached the next group."""
    position: int = 0
    """In its order."""


def run_step_in_flight(step: StepWork, orders: Sequence[Order], clocks: Sequence[Clock]) -> None:
    """One step of groups that have a ministage each, from where each group is."""
    stages = []
    for i, (worker, work, clock) in enumerate(zip(step.workers, step.works, clocks, strict=True)):
        begin = clock.compute = clock.reduce = clock.update = clock.end
        clock.before = begin
        gathers = worker.zero in (1, 2) and work.gather_s > 0
        sends = [seconds / worker.microbatches_per_device for seconds in step.sends[i : i + 2]]
        stages.append(
            _Stage(
                order=orders[i],
                seconds=(
                    _microbatch_s(worker, work, forward=True),
                    _microbatch_s(worker, work, forward=False),
                ),
                ready_s=begin + gathers * work.first_unit * work.gather_s,
                gathered_s=begin + gathers * work.gather_s,
                sends=(
                    sends[1] if i + 1 < len(step.sends) else 0.0,
                    sends[0] if i > step.lowest_backward else 0.0,
                ),
            )
        )
    _run_stages(stages)
    for clock, stage in zip(clocks, stages, strict=True):
        clock.compute = stage.ready_s
    for i in range(step.lowest_backward, len(step.works)):
        worker, work, clock = step.workers[i], step.works[i], clocks[i]
        if worker.reduces_beside or (worker.zero != 3 and worker.num_reductions == 1):
            clock.compute += work.reduce_s
            clock.reduce = clock.compute
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
        way = 0 if kind is Kind.F else 1
        arrived_s = 0.0
        if needs := stage.order.needs[way]:
            arrivals = stages[i + 1 if way else i - 1].arrivals[way]
            if needs[m] >= len(arrivals):
                return
            arrived_s = arrivals[needs[m]]
        stage.ready_s = max(stage.gathered_s, max(stage.ready_s, arrived_s) + stage.seconds[way])
        sent = stage.arrivals[way]
        sent.append(max(stage.ready_s, sent[-1] if sent else 0.0) + stage.sends[way])
        stage.position += 1


def _microbatch_s(worker: Worker, work: Work, *, forward: bool) -> float:
    """A microbatch's computation with the collectives that nothing hides."""
    seconds = (work.forward_s if forward else work.backward_s) / worker.microbatches_per_device
    if worker.zero == 3:
        beside_s = work.gather_s + (0.0 if forward else work.reduce_s)
        if worker.is_cpu:
            return seconds + beside_s
        return max(seconds, beside_s) + work.first_unit * beside_s
    if not forward and worker.num_reductions > 1:
        return max(seconds, work.reduce_s) if worker.reduces_beside else seconds + work.reduce_s
    return seconds
