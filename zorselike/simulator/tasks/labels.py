"""What one rank's tasks are called: spans and the times of actions, for drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zorselike.schedule.actions import Action
from zorselike.simulator.result import Span, Track
from zorselike.simulator.tasks.graph import NOTHING, Times

_BLOCKING = frozenset({"compute", "reduce", "update", "host"})
"""Tracks of what an action does itself; it only starts the rest."""


class Label(NamedTuple):
    """What a task is drawn as."""

    track: Track
    task: int
    position: int
    """Position of its action in the rank's list."""


class ActionTasks(NamedTuple):
    """First and last task of an action, `NOTHING` if it has none, and the rank's last computation before."""

    first: int
    last: int
    before: int


class Labels:
    """Labels of one rank, collected while its program is built."""

    def __init__(self) -> None:
        self.labels: list[Label] = []
        self.actions: list[ActionTasks] = []
        self._position = 0
        self._before = NOTHING
        self._num_before = 0

    def begin(self, position: int, before: int) -> None:
        """An action begins; `before`: the rank's last computation so far."""
        self._position, self._before = position, before
        self._num_before = len(self.labels)

    def add(self, track: Track, task: int) -> None:
        """Labels a task of the current action."""
        self.labels.append(Label(track, task, self._position))

    def end(self) -> None:
        """The current action has no more tasks."""
        tasks = [label.task for label in self.labels[self._num_before :] if label.track in _BLOCKING]
        first, last = (tasks[0], tasks[-1]) if tasks else (NOTHING, NOTHING)
        self.actions.append(ActionTasks(first, last, self._before))


def make_spans(
    actions: Mapping[int, Sequence[Action]], labels: Mapping[int, Labels], times: Times, start_s: float
) -> tuple[Span, ...]:
    """Spans of one step, in seconds since `start_s`; tasks that take no time have none."""
    begin, end = times.begin, times.end
    spans = (
        Span(rank, track, begin[task] - start_s, end[task] - start_s, actions[rank][position])
        for rank, of_rank in labels.items()
        for track, task, position in of_rank.labels
        if end[task] > begin[task]
    )
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.rank, span.stop_s)))


def find_action_times(
    labels: Mapping[int, Labels], times: Times, start_s: float, previous_end_s: Mapping[int, float]
) -> dict[int, tuple[tuple[float, float], ...]]:
    """Start and end of every action of one step, by rank, in seconds since `start_s`; `previous_end_s`: when
    each rank ended the previous step."""

    def find(rank: int, action: ActionTasks) -> tuple[float, float]:
        if action.first != NOTHING:
            return times.begin[action.first] - start_s, times.end[action.last] - start_s
        at = times.end[action.before] if action.before >= 0 else previous_end_s[rank]
        return at - start_s, at - start_s

    return {rank: tuple(find(rank, action) for action in each.actions) for rank, each in labels.items()}
