"""The order that runs, unless another is asked for (Zorse 4.1).

Forward: all microbatches of a ministage, then the group's next ministage. Backward: the same in reverse.
So it is in Torch's LoopedBFS, but for the end of the way: through the last ministage of each group
microbatches go forward and backward in turn, as in 1F1B, since nothing is left to wait for. Fewer are in
flight there (in the last ministage, which holds most, logits, one), and with ZeRO 2 these ministages are
gathered once. After that groups go backward in the order in which gradients come, the oldest microbatch
first; a group by itself the newest.

With one ministage that is gradient accumulation, and parameters of ZeRO 1 and 2 are gathered once a step. So
they are where the plan bounds microbatches in flight, for all ministages of a group at once: `in_flight.py`
says in which order groups go forward and backward, there and here.
"""

from __future__ import annotations

from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.orders.in_flight import order_in_flight, order_last_ministages
from zorselike.schedule.orders.order import Order, find_alternating, find_first_in_turn
from zorselike.schedule.spec import ScheduleSpec


def ours(spec: ScheduleSpec) -> Order:
    """Breadth first, and in turn at the end; bounded in flight where the plan says so. Raises `LowBoundError`
    where no order keeps the plan's bounds."""
    plan = spec.plan
    if plan.bounds_in_flight and spec.has_backward:
        alternating = frozenset(range(plan.num_ministages))
        return Order(order_in_flight(spec), keeps_gathered=True, alternating=alternating)
    owners = [ministage.group for ministage in plan.ministages]
    last = order_last_ministages(spec, find_first_in_turn(owners)) if spec.has_backward else {}
    computations = tuple(_breadth_first(spec, g, last) for g in range(len(plan.groups)))
    keeps_gathered = plan.num_ministages == 1 and spec.has_backward
    return Order(
        computations, keeps_gathered=keeps_gathered, alternating=find_alternating(computations, owners)
    )


def _breadth_first(spec: ScheduleSpec, g: int, last: dict[int, list[Action]]) -> tuple[Action, ...]:
    """`last`: what is computed of each ministage where microbatches go in turn."""
    ministages = spec.plan.ministages_of_group(g)
    numbers = range(spec.plan.groups[g].max_microbatches)
    in_turn = [action for i in ministages for action in last.get(i, ())]
    others = [i for i in ministages if i not in last]
    back = [i for i in reversed(others) if i >= spec.lowest_backward]
    back_numbers = numbers if len(spec.plan.groups) > 1 else numbers[::-1]
    return (
        *(Action(Kind.F, i, number) for i in others for number in numbers),
        *in_turn,
        *(Action(Kind.B, i, number) for i in back for number in back_numbers),
    )
