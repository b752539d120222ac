"""Which ranks wait for each other for ever, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zorselike.schedule.actions import Action
from zorselike.schedule.errors import ScheduleError
from zorselike.simulator.events import PENDING, Times
from zorselike.simulator.rank.labels import Notes
from zorselike.simulator.rank.program import Program
from zorselike.simulator.rank.tasks import COPIES, Tasks, Work

MOST_RANKS = 16
"""Ranks that are named."""


class DeadlockError(ScheduleError):
    """A schedule's ranks wait for each other for ever."""


def describe_deadlock(
    actions: Mapping[int, Sequence[Action]],
    tasks: Tasks,
    programs: Mapping[int, Program],
    notes: Mapping[int, Notes],
    times: Times,
) -> DeadlockError:
    """Each rank that does not end, with the first of its actions that does not, and what that waits for."""
    num_tasks = len(tasks.seconds)
    firsts = range(0, len(times.end), num_tasks)
    first = next(f for f in firsts if any(times.end[f + p.end] == PENDING for p in programs.values()))
    times = times.part(first, first + num_tasks)
    stuck = [rank for rank, program in programs.items() if times.end[program.end] == PENDING]
    awaited: dict[int, list[int]] = {}
    for task, followers in enumerate(tasks.followers):
        if times.end[task] == PENDING:
            for follower in followers:
                awaited.setdefault(follower, []).append(task)
    lines = []
    for rank in stuck[:MOST_RANKS]:
        unfinished = (note for note in notes[rank].notes if times.end[note.task] == PENDING)
        stands = min(unfinished, key=lambda note: note.position, default=None)
        if stands is None:
            where, task = "the end", programs[rank].end
        else:
            where, task = f"action {stands.position}, {actions[rank][stands.position]}", stands.task
        lines.append(f"rank {rank} at {where} waits for {_reason(tasks, times, task, awaited)}")
    more = len(stuck) - MOST_RANKS
    rest = [f"and {more} more ranks"] if more > 0 else []
    return DeadlockError("\n".join(["the ranks wait for each other for ever:", *lines, *rest]))


def _reason(tasks: Tasks, times: Times, task: int, awaited: Mapping[int, Sequence[int]]) -> str:
    """What a task waits for, as far back as the first meeting that has not begun."""
    seen = set()
    while task not in seen:
        seen.add(task)
        if task in tasks.parties:
            break
        # A meeting with others says more than what the rank itself has still to do.
        task = min(awaited.get(task, [task]), key=lambda other: (other not in tasks.parties, other))
    ranks = tasks.parties.get(task)
    if ranks is None:
        return "copies that do not end" if tasks.work[task] in COPIES else "what comes before it"
    if times.begin[task] != PENDING:
        return f"bytes between ranks {list(ranks)} that do not move: a capacity on their way is 0"
    if tasks.work[task] is Work.TRANSFER:
        return f"a transfer from rank {ranks[0]} to rank {ranks[1]}, to which not both have come"
    return f"a collective to which not all of ranks {list(ranks)} have come"
