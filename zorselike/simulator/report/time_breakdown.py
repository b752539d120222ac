"""Where one rank's time went: what it computed, and what it waited for in between.

Each gap is explained backward: what the rank's next work waited for last, what that waited for, and so on
until the gap is filled. A transfer or collective accounts for its own duration; the time before a transfer
was spent waiting for its data, the time before a collective waiting for the other ranks.
"""

from __future__ import annotations

from zorselike.simulator.result import RankTimes
from zorselike.simulator.tasks.graph import COPIES, NOTHING, Tasks, Times, Work
from zorselike.simulator.tasks.program import Program

_BUSY = (Work.FORWARD, Work.BACKWARD, Work.UPDATE, Work.HOST)
_COMMUNICATION = (Work.TRANSFER, Work.COLLECTIVE)


def break_down_time(
    program: Program, tasks: Tasks, times: Times, *, num_steps: int, iteration_s: float
) -> RankTimes:
    """One rank's last step: an iteration up to the rank's own end.

    Ranks of a pipeline end at different times, each a whole iteration after its previous end.
    """
    breakdown = _Breakdown(tasks, times, program.rank)
    num_tasks = len(tasks.seconds)
    last = (num_steps - 1) * num_tasks
    start = times.end[last + program.end] - iteration_s
    clock = start
    for first in range(max(last - num_tasks, 0), last + 1, num_tasks):
        for task in (first + local for local in program.streams.compute.ran):
            if times.end[task] > start:
                if times.begin[task] > clock:
                    breakdown.add_gap(task, clock, times.begin[task])
                    clock = times.begin[task]
                breakdown.add(tasks.work[task - first], times.end[task] - clock)
                clock = times.end[task]
    return breakdown.result(program, last)


class _Breakdown:
    """Seconds of one rank by what they were spent on."""

    def __init__(self, tasks: Tasks, times: Times, rank: int) -> None:
        self.tasks, self.times, self.rank = tasks, times, rank
        self.busy = self.data = self.communication = self.copies = 0.0

    def add(self, work: Work, seconds: float) -> None:
        """Time in which a task occupied the compute stream."""
        if work in _BUSY:
            self.busy += seconds
        elif work in COPIES:
            self.copies += seconds
        else:
            self.communication += seconds

    def add_gap(self, waiting: int, start: float, stop: float) -> None:
        """A gap of the compute stream before the task `waiting`."""
        works, ranks, causes = self.tasks.work, self.tasks.rank, self.times.cause
        task, num_tasks = waiting, len(works)
        waits_for_ranks = works[task % num_tasks] is Work.COLLECTIVE
        """Whether what remains is spent waiting for the other ranks of a collective, not for data."""
        while stop > start:
            task = causes[task]
            if task == NOTHING:
                break
            work = works[task % num_tasks]
            if work not in _COMMUNICATION and ranks[task % num_tasks] != self.rank:
                break
            began = max(self.times.begin[task], start)
            self.add(work, stop - began)
            stop = began
            if work in _COMMUNICATION:
                waits_for_ranks = work is Work.COLLECTIVE
        if waits_for_ranks:
            self.communication += max(0.0, stop - start)
        else:
            self.data += max(0.0, stop - start)

    def result(self, program: Program, last: int) -> RankTimes:
        seconds = dict.fromkeys((Work.FORWARD, Work.BACKWARD, Work.UPDATE), 0.0)
        for local in {*program.streams.compute.ran, *program.streams.update.ran}:
            work = self.tasks.work[local]
            if work in seconds:
                seconds[work] += self.times.end[last + local] - self.times.begin[last + local]
        return RankTimes(
            busy_s=self.busy,
            waiting_for_data_s=self.data,
            exposed_communication_s=self.communication,
            exposed_copies_s=self.copies,
            forward_s=seconds[Work.FORWARD],
            backward_s=seconds[Work.BACKWARD],
            update_s=seconds[Work.UPDATE],
        )
