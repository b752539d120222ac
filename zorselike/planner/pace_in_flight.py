"""When each round of a step is computed where groups go backward before all is forward.

The order is the schedule's own (`schedule/in_flight.py`); seconds are each group's own. A group is one
worker, and what it sends on shares the wire with nothing but itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zorselike.schedule.actions import Kind
from zorselike.schedule.in_flight import Computation


@dataclass
class Stage:
    """A group with its ministage, while a step goes on."""

    order: Sequence[Computation]
    forward_needs: Sequence[int]
    """Of each round, the last round of the stage before that it waits for; `()` for the first stage."""
    backward_needs: Sequence[int]
    """Likewise of the stage behind."""
    forward_s: float
    """Of a round."""
    backward_s: float
    ready_s: float
    """From when on it can compute."""
    gathered_s: float
    """Before this no round is at its end."""
    send_forward_s: float = 0.0
    """What a round's results take to the next group; 0 for the last."""
    send_backward_s: float = 0.0
    forward_arrivals: list[float] = field(default_factory=list)
    """Of its rounds, when their results have reached the next group."""
    backward_arrivals: list[float] = field(default_factory=list)
    position: int = 0
    """In its order."""


def run_in_flight(stages: Sequence[Stage]) -> None:
    """Runs a step; `ready_s` is then when each group has computed all."""
    before: list[int] = []
    while (now := [stage.position for stage in stages]) != before:
        before = now
        for i, stage in enumerate(stages):
            _go_on(stages, i, stage)
    assert all(stage.position == len(stage.order) for stage in stages), "orders wait for each other"


def _go_on(stages: Sequence[Stage], i: int, stage: Stage) -> None:
    """Computes until something has not arrived."""
    while stage.position < len(stage.order):
        kind, m = stage.order[stage.position]
        is_forward = kind is Kind.F
        arrived_s = 0.0
        if needs := stage.forward_needs if is_forward else stage.backward_needs:
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
