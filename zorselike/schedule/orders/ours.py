"""The order that runs, unless another is asked for (Zorse 4.1).

Forward: all microbatches of a ministage, then the group's next ministage. Backward: the same in
reverse, newest microbatch first. Torch's LoopedBFS is the same order.

A plan with a single group has no other group to feed: in its last ministage each microbatch goes
forward and at once backward, so that what that ministage holds most of, logits, is held for one
microbatch. If it is the only ministage, that is gradient accumulation, and parameters of ZeRO 1 and 2
are gathered once for the step.

So they are where the plan bounds microbatches in flight, for all ministages of a group at once:
`in_flight.py` says in which order it goes forward and backward.
"""

from __future__ import annotations

from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.orders.in_flight import order_in_flight
from zorselike.schedule.orders.order import Order
from zorselike.schedule.spec import ScheduleSpec


def ours(spec: ScheduleSpec) -> Order:
    """Breadth first; accumulation with a single ministage; bounded in flight where the plan says so. Raises
    `LowBoundError` where no order keeps the plan's bounds."""
    plan = spec.plan
    if plan.bounds_in_flight and spec.has_backward:
        return Order(order_in_flight(spec), keeps_gathered=True, receives_by_kind=True)
    keeps_gathered = plan.num_ministages == 1 and spec.has_backward
    computations = tuple(_breadth_first(spec, g) for g in range(len(plan.groups)))
    return Order(computations, keeps_gathered=keeps_gathered)


def _breadth_first(spec: ScheduleSpec, g: int) -> tuple[Action, ...]:
    ministages = spec.plan.ministages_of_group(g)
    numbers = range(spec.plan.groups[g].max_microbatches)
    turning = [ministages[-1]] if len(spec.plan.groups) == 1 and spec.has_backward else []
    forward = [i for i in ministages if i not in turning]
    backward = [i for i in reversed(ministages) if i >= spec.lowest_backward and i not in turning]
    return (
        *(Action(Kind.F, i, number) for i in forward for number in numbers),
        *(Action(kind, i, number) for i in turning for number in numbers for kind in (Kind.F, Kind.B)),
        *(Action(Kind.B, i, number) for i in backward for number in reversed(numbers)),
    )
