"""The order that runs, unless another is asked for (Zorse 4.1).

Forward: all microbatches of a ministage, then the group's next ministage. Backward: the same in
reverse. So it is in Torch's LoopedBFS, but for the last ministage, which has no other to feed: there
each microbatch goes forward and at once backward. What that ministage holds most of, logits, is held
for one microbatch, and the groups before it are sent the first gradients while it goes forward. They
go backward in the order in which these come, the oldest microbatch first; a group by itself the newest.

If it is the only ministage, that is gradient accumulation, and parameters of ZeRO 1 and 2 are gathered
once for the step.

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
    turning = plan.num_ministages - 1 if spec.has_backward else None
    computations = tuple(_breadth_first(spec, g, turning) for g in range(len(plan.groups)))
    return Order(computations, keeps_gathered=turning == 0)


def _breadth_first(spec: ScheduleSpec, g: int, turning: int | None) -> tuple[Action, ...]:
    ministages = spec.plan.ministages_of_group(g)
    numbers = range(spec.plan.groups[g].max_microbatches)
    others = [i for i in ministages if i != turning]
    both = (Kind.F, Kind.B) if turning in ministages else ()
    goes_back = [i for i in reversed(others) if i >= spec.lowest_backward]
    back_numbers = numbers if len(spec.plan.groups) > 1 else numbers[::-1]
    return (
        *(Action(Kind.F, i, number) for i in others for number in numbers),
        *(Action(kind, turning, number) for number in numbers for kind in both),
        *(Action(Kind.B, i, number) for i in goes_back for number in back_numbers),
    )
