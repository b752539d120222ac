"""Spans and the times of actions, in seconds since the step began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zorselike.schedule.actions import Action
from zorselike.simulator.events import Times
from zorselike.simulator.rank.labels import Mark, Notes
from zorselike.simulator.rank.tasks import NOTHING
from zorselike.simulator.result import Span


def make_spans(
    actions: Mapping[int, Sequence[Action]],
    notes: Mapping[int, Notes],
    times: Times,
    first: int,
    began: float,
) -> tuple[Span, ...]:
    """Of the step whose first task is `first` and which began at `began`; what takes no time has none."""
    spans = []
    for rank, own in notes.items():
        for note in own.notes:
            start, stop = times.begin[first + note.task], times.end[first + note.task]
            if stop > start:
                spans.append(
                    Span(rank, note.track, start - began, stop - began, actions[rank][note.position])
                )
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.rank, span.stop_s)))


def find_action_times(
    notes: Mapping[int, Notes],
    times: Times,
    first: int,
    began: float,
    ended_before: Mapping[int, float],
) -> dict[int, tuple[tuple[float, float], ...]]:
    """Start and end of every action of every rank; `ended_before`: when each one's step before was over."""

    def span_of(rank: int, mark: Mark) -> tuple[float, float]:
        if mark.first != NOTHING:
            return times.begin[first + mark.first] - began, times.end[first + mark.last] - began
        at = times.end[first + mark.before] if mark.before >= 0 else ended_before[rank]
        return at - began, at - began

    return {rank: tuple(span_of(rank, mark) for mark in own.marks) for rank, own in notes.items()}
