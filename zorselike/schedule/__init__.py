"""What every rank does, in order: the action grammar, the builder, the checker. No torch."""

from zorselike.schedule.actions import Action, Kind, format_actions, parse_action, parse_actions
from zorselike.schedule.assign import assign_microbatches
from zorselike.schedule.checker.check import CheckReport, check
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.lowering.build import build
from zorselike.schedule.orders.torch_csv import from_torch_csv, to_torch_csv

__all__ = [
    "Action",
    "CheckReport",
    "Kind",
    "ScheduleError",
    "assign_microbatches",
    "build",
    "check",
    "format_actions",
    "from_torch_csv",
    "parse_action",
    "parse_actions",
    "to_torch_csv",
]
