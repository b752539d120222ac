"""Which ranks wait for each other forever, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zorselike.schedule.actions import Action
from zorselike.schedule.errors import ScheduleError
from zorselike.simulator.tasks.graph import COPIES, PENDING, Tasks, Times, Work
from zorselike.simulator.tasks.labels import Labels
from zorselike.simulator.tasks.program import Program

MAX_RANKS = 16
"""How many ranks the message names."""


class DeadlockError(ScheduleError):
    """A schedule's ranks wait for each other forever."""


def describe_deadlock(
    actions: Mapping[int, Sequence[Action]],
    tasks: Tasks,
    programs: Mapping[int, Program],
    labels: Mapping[int, Labels],
    times: Times,
) -> DeadlockError:
    """Names each rank that does not finish, its first unfinished action, and what that waits for."""
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
    for rank in stuck[:MAX_RANKS]:
        unfinished = (label for label in labels[rank].labels if times.end[label.task] == PENDING)
        label = min(unfinished, key=lambda each: each.position, default=None)
        if label is None:
            where, task = "the end", programs[rank].end
        else:
            where, task = f"action {label.position}, {actions[rank][label.position]}", label.task
        lines.append(f"rank {rank} at {where} waits for {_describe_wait(tasks, times, task, awaited)}")
    if len(stuck) > MAX_RANKS:
        lines.append(f"and {len(stuck) - MAX_RANKS} more ranks")
    return DeadlockError("\n".join(["the ranks wait for each other forever:", *lines]))


def _describe_wait(tasks: Tasks, times: Times, task: int, awaited: Mapping[int, Sequence[int]]) -> str:
    """What a task waits for, traced back to the first transfer or collective that has not begun."""
    seen = set()
    while task not in seen:
        seen.add(task)
        if task in tasks.parties:
            break
        # A transfer or collective says more than what the rank itself has still to do.
        task = min(awaited.get(task, [task]), key=lambda other: (other not in tasks.parties, other))
    ranks = tasks.parties.get(task)
    if ranks is None:
        return "copies that do not end" if tasks.work[task] in COPIES else "what comes before it"
    if times.begin[task] != PENDING:
        return f"bytes between ranks {list(ranks)} that do not move: a capacity on their path is 0"
    if tasks.work[task] is Work.TRANSFER:
        return f"a transfer from rank {ranks[0]} to rank {ranks[1]}, which not both have reached"
    return f"a collective that not all of ranks {list(ranks)} have reached"
