"""What every rank does, in order: actions, orders of computations, their lowering, the checker. No torch."""

from zorselike.schedule.actions import Action, Kind, format_actions, parse_action, parse_actions
from zorselike.schedule.build import build, from_torch_csv
from zorselike.schedule.checker.check import CheckReport, check
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.orders.torch_csv import to_torch_csv
from zorselike.schedule.spec import ScheduleSpec

__all__ = [
    "Action",
    "CheckReport",
    "Kind",
    "ScheduleError",
    "ScheduleSpec",
    "build",
    "check",
    "format_actions",
    "from_torch_csv",
    "parse_action",
    "parse_actions",
    "to_torch_csv",
]
