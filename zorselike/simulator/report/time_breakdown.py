"""Where one rank's time went: what it computed, and what it waited for in between.

Each gap is explained backward: what the rank's next work waited for last, what that waited for, and so on
until the gap is filled. A transfer or collective accounts for its own duration; the time before a transfer
was spent waiting for its data, the time before a collective waiting for the other ranks. It is explained
when somebody asks: most plans of a search are only as good as their step is short.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import overload

from zorselike.simulator.result import RankTimes
from zorselike.simulator.tasks.graph import COPIES, NOTHING, Tasks, Times, Work
from zorselike.simulator.tasks.program import Program

_BUSY = (Work.FORWARD, Work.BACKWARD, Work.UPDATE, Work.HOST)
_COMMUNICATION = (Work.TRANSFER, Work.COLLECTIVE)


class TimeBreakdown(Sequence[RankTimes]):
    """By rank, in order: its last step, an iteration up to the rank's own end.

    Ranks of a pipeline end at different times, each a whole iteration after its previous end.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        tasks: Tasks,
        times: Times,
        *,
        num_steps: int,
        iteration_s: float,
        first: Mapping[int, int] | None = None,
    ) -> None:
        """`first`: by rank, the one whose program is its too, where not every rank has one."""
        self._first = {rank: rank for rank in programs} if first is None else first
        self._ranks = sorted(self._first)
        self._streams = {
            rank: (program.streams.compute.ran, program.streams.update.ran, program.end)
            for rank, program in programs.items()
        }
        self._num_tasks = len(tasks.seconds)
        self._last = (num_steps - 1) * self._num_tasks
        self._work, self._rank = tasks.work, tasks.rank
        # As arrays, for the best of a search are kept.
        self._times = Times(array("d", times.begin), array("d", times.end), array("q", times.cause))
        self._iteration_s = iteration_s
        self._found: dict[int, RankTimes] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, position: int) -> RankTimes: ...
    @overload
    def __getitem__(self, position: slice) -> list[RankTimes]: ...
    def __getitem__(self, position: int | slice) -> RankTimes | list[RankTimes]:
        if isinstance(position, slice):
            return [self[each] for each in range(len(self))[position]]
        rank = self._first[self._ranks[position]]
        if rank not in self._found:
            self._found[rank] = self._break_down(rank)
        return self._found[rank]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TimeBreakdown) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def _break_down(self, rank: int) -> RankTimes:
        computed, updated, program_end = self._streams[rank]
        begin, end, work = self._times.begin, self._times.end, self._work
        breakdown = _Breakdown(work, self._rank, self._times, rank)
        start = end[self._last + program_end] - self._iteration_s
        clock = start
        for first in range(max(self._last - self._num_tasks, 0), self._last + 1, self._num_tasks):
            for task in (first + local for local in computed):
                if end[task] > start:
                    if begin[task] > clock:
                        breakdown.add_gap(task, clock, begin[task])
                        clock = begin[task]
                    breakdown.add(work[task - first], end[task] - clock)
                    clock = end[task]
        return breakdown.result({*computed, *updated}, self._last)


class _Breakdown:
    """Seconds of one rank by what they were spent on."""

    def __init__(self, works: Sequence[Work], ranks: Sequence[int], times: Times, rank: int) -> None:
        self.works, self.ranks, self.times, self.rank = works, ranks, times, rank
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
        works, ranks, causes = self.works, self.ranks, self.times.cause
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

    def result(self, computed: set[int], last: int) -> RankTimes:
        """`computed`: tasks of a step that computed; `last`: where the last step begins."""
        seconds = dict.fromkeys((Work.FORWARD, Work.BACKWARD, Work.UPDATE), 0.0)
        for local in computed:
            work = self.works[local]
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
