"""The checker: proves before a run that a schedule does what its plan asks and cannot hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zorselike.schedule.actions import Action
from zorselike.schedule.checker.channels import match_transfers
from zorselike.schedule.checker.collectives import check_collectives
from zorselike.schedule.checker.early import find_early
from zorselike.schedule.checker.order import check_order
from zorselike.schedule.checker.rendezvous import check_ends, find_buffered_edges
from zorselike.schedule.checker.steps import flatten
from zorselike.schedule.checker.waits import find_waits
from zorselike.schedule.spec import ScheduleSpec


@dataclass(frozen=True)
class CheckReport:
    """What the checker found out about a correct schedule."""

    buffered_edges: frozenset[tuple[int, int, str]]
    """(source rank, target rank, "F" or "B") on which a send must not wait for its receive, or whose receives
    must not occupy a GPU."""
    cycles: tuple[str, ...]
    """The cycles of waiting ranks that made them so, one rank a line."""
    early: tuple[str, ...]
    """The receives that made them so, posted before what their senders wait for, one of an edge."""
    num_actions: int


def check(spec: ScheduleSpec, actions: Mapping[int, Sequence[Action]]) -> CheckReport:
    """Proves a schedule complete, ordered, within its memory bound and free of deadlock.

    Each in turn: every row goes forward and, where due, backward exactly once in every
    ministage, with its input rows there, reduced and stepped after; parameters are gathered
    while they compute and no more ministages than the ZeRO stage allows; all ranks of a group
    issue the same collectives in the same order; what is offloaded is back before it is used;
    every send meets its receive; all lists end if sends buffer. Then it finds the edges on which
    sends must buffer for them to end, and those whose receives are posted before what their senders
    wait for. Raises `ScheduleError` at the first fault, with a table of the lists around it.
    """
    steps = flatten(spec.plan, actions)
    for rank, rank_steps in steps.items():
        check_order(spec, actions, rank, rank_steps)
    check_collectives(spec, actions, steps)
    matches = match_transfers(actions, steps)
    waits = find_waits(spec, steps, matches)
    early = [*find_early(waits, check_ends(waits, actions), matches)]
    buffered, cycles = find_buffered_edges(spec.plan, waits, actions, [receive.edge for receive in early])
    return CheckReport(
        buffered,
        cycles,
        early=tuple(receive.describe(actions) for receive in early),
        num_actions=sum(map(len, actions.values())),
    )
