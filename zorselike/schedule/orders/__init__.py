"""Orders in which groups compute (Zorse 4.1; 1F1B and interleaved 1F1B as pipelines run them today; files of
torch.distributed.pipelining).

To add a schedule: a file here with a function from `ScheduleSpec` to `Order` (for each group, its `F`
and `B` in order), and one line in `ORDERS`. The function raises `ScheduleError` for plans of a shape that it
does not take. `zorselike/schedule/lowering/` adds transfers, collectives, updates and copies to it, and
`zorselike simulate --schedule NAME` simulates it. The runtime runs `DEFAULT_ORDER`, and the planner simulates
that; its estimates (`zorselike/planner/estimate/`) are of `ours`. An order that comes back to a ministage
sets `keeps_gathered`; a run with ZeRO 2 then takes two ministages a group at most.
"""

from collections.abc import Callable, Mapping

from zorselike.schedule.orders.one_f_one_b import interleaved, one_f_one_b
from zorselike.schedule.orders.order import Order
from zorselike.schedule.orders.ours import ours
from zorselike.schedule.spec import ScheduleSpec

ORDERS: Mapping[str, Callable[[ScheduleSpec], Order]] = {
    "ours": ours,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}

DEFAULT_ORDER = "ours"
"""What is run, planned, and simulated where nothing else is asked for."""
