"""Errors of a wrong schedule: the fault in one line, then its place in the lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zorselike.schedule.actions import Action

CONTEXT = 3
"""Actions shown before and after the wrong one."""


class ScheduleError(ValueError):
    """A schedule does not do what its plan asks, or its ranks would wait for each other forever."""


def error_at(
    actions: Mapping[int, Sequence[Action]], message: str, *places: tuple[int, int]
) -> ScheduleError:
    """An error with a table of `places`, each `(rank, position)`; the fault is at the first."""
    return ScheduleError(f"{message}\n{draw_places(actions, places)}" if places else message)


def name_place(actions: Mapping[int, Sequence[Action]], place: tuple[int, int]) -> str:
    """A place in words: `rank 1, action 7, 2F0`."""
    rank, position = place
    if position == len(actions[rank]):
        return f"rank {rank}, at the end"
    return f"rank {rank}, action {position}, {actions[rank][position].text}"


def draw_places(actions: Mapping[int, Sequence[Action]], places: Sequence[tuple[int, int]]) -> str:
    """A table of the lists around each place, one column a place, the first one's cell marked."""
    columns = []
    for column, (rank, position) in enumerate(places):
        cells = [f"rank {rank}"]
        for offset in range(-CONTEXT, CONTEXT + 1):
            cell = _cell(actions.get(rank, ()), position + offset)
            cells.append(f">> {cell} <<" if offset == column == 0 else f"   {cell}")
        width = max(map(len, cells))
        columns.append([cell.ljust(width) for cell in cells])
    rows = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    return "\n".join(row for row in rows if row)


def _cell(actions: Sequence[Action], position: int) -> str:
    if position < 0 or position > len(actions):
        return ""
    text = actions[position].text if position < len(actions) else "(end)"
    return f"{position}: {text}"
