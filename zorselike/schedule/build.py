"""From a plan to what every rank does, in order: an order of computations and its lowering."""

from __future__ import annotations

from collections.abc import Collection

from zorselike.errors import FileError
from zorselike.schedule.actions import Action
from zorselike.schedule.checker.check import check
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.lowering.lower import lower
from zorselike.schedule.orders import DEFAULT_ORDER, ORDERS
from zorselike.schedule.orders.torch_csv import read_torch_csv
from zorselike.schedule.spec import ScheduleSpec
from zorselike.text.files import read_text


def build(
    spec: ScheduleSpec, order: str = DEFAULT_ORDER, *, ranks: Collection[int] | None = None
) -> dict[int, list[Action]]:
    """The actions of every rank for one optimizer step, or one evaluation if the spec is `forward_only`.

    `order` is a name in `ORDERS`, or the path of a CSV file (see `from_torch_csv`); with `ranks` only theirs
    are built, in an order with a name. Raises `ScheduleError` if there is no such order, or it does not take
    the plan.
    """
    if order in ORDERS:
        return lower(spec, ORDERS[order](spec), ranks)
    if not order.endswith(".csv"):
        raise ScheduleError(
            f"there is no schedule '{order}': give one of {', '.join(ORDERS)}, or a .csv file"
        )
    try:
        return from_torch_csv(spec, read_text(order, "schedule"))
    except (FileError, ScheduleError) as error:
        raise ScheduleError(f"{order}: {error}") from None


def from_torch_csv(spec: ScheduleSpec, text: str) -> dict[int, list[Action]]:
    """The actions of every rank in the order of a file of torch.distributed.pipelining's, proven by `check`.
    Raises `ScheduleError`, which says where, if it does not fit the plan or its schedule is wrong."""
    actions = lower(spec, read_torch_csv(spec, text))
    check(spec, actions)
    return actions
