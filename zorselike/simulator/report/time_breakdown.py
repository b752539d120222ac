"""Where one rank's time went: what it computed, and what it waited for in between.

Backward from each gap: what the rank's next work waited for last, what that waited for, and so on until
the gap is filled. A transfer or collective fills its own time; before a transfer began, its data were not
there; before a collective began, the others were not.
"""

from __future__ import annotations

from zorselike.simulator.events import Times
from zorselike.simulator.rank.program import Program
from zorselike.simulator.rank.tasks import COPIES, NOTHING, Tasks, Work
from zorselike.simulator.result import RankTimes

_WORKS = (Work.FORWARD, Work.BACKWARD, Work.UPDATE, Work.HOST)
_MEETINGS = (Work.TRANSFER, Work.COLLECTIVE)


def account_for(
    program: Program, tasks: Tasks, times: Times, *, num_steps: int, iteration_s: float
) -> RankTimes:
    """Where one rank's last step went: the time of one iteration up to its own end.

    Ranks of a pipeline end at different times, each a whole iteration after its last end.
    """
    account = _Account(tasks, times, program.rank)
    num_tasks = len(tasks.seconds)
    last = (num_steps - 1) * num_tasks
    start = times.end[last + program.end] - iteration_s
    clock = start
    for base in range(max(last - num_tasks, 0), last + 1, num_tasks):
        for task in (base + local for local in program.lanes.compute.ran):
            if times.end[task] > start:
                if times.begin[task] > clock:
                    account.fill(task, clock, times.begin[task])
                    clock = times.begin[task]
                account.add(tasks.work[task - base], times.end[task] - clock)
                clock = times.end[task]
    return account.close(program, last)


class _Account:
    """Seconds of one rank."""

    def __init__(self, tasks: Tasks, times: Times, rank: int) -> None:
        self.tasks, self.times, self.rank = tasks, times, rank
        self.busy = self.data = self.communication = self.copies = 0.0
        self._num_tasks = len(tasks.seconds)

    def add(self, work: Work, seconds: float) -> None:
        """What occupies the rank's compute."""
        if work in _WORKS:
            self.busy += seconds
        elif work in COPIES:
            self.copies += seconds
        else:
            self.communication += seconds

    def fill(self, waiting: int, start: float, stop: float) -> None:
        """A gap before `waiting`, which occupies the rank's compute after it."""
        works, ranks, causes = self.tasks.work, self.tasks.rank, self.times.cause
        task = waiting
        needs_others = works[task % self._num_tasks] is Work.COLLECTIVE
        """Whether the others of a collective are waited for, and no data."""
        while stop > start:
            task = causes[task]
            if task == NOTHING:
                break
            local = task % self._num_tasks
            work = works[local]
            if work not in _MEETINGS and ranks[local] != self.rank:
                break
            began = max(self.times.begin[task], start)
            self.add(work, stop - began)
            stop = began
            if work in _MEETINGS:
                needs_others = work is Work.COLLECTIVE
        if stop > start and needs_others:
            self.communication += stop - start
        elif stop > start:
            self.data += stop - start

    def close(self, program: Program, last: int) -> RankTimes:
        seconds = dict.fromkeys((Work.FORWARD, Work.BACKWARD, Work.UPDATE), 0.0)
        for local in {*program.lanes.compute.ran, *program.lanes.update.ran}:
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
