"""A simulated step as text: one line per rank, time from left to right."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from string import ascii_lowercase, ascii_uppercase

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Kind
from zorselike.simulator.result import Simulation, Span, Track
from zorselike.text.wording import show_numbers

IDLE = "."
_MARKS: dict[Track, str] = {
    "update": "+",
    "gather": "=",
    "reduce": "=",
    "send": "-",
    "receive": "-",
    "to device": "%",
    "to host": "%",
    "host": "^",
}
"""Marks of what is drawn while nothing computes."""
_MEANINGS = {
    "+": "update",
    "=": "collective that nothing hides",
    "-": "rows on a link",
    "%": "copy to or from the host",
    "^": "work of the host",
    IDLE: "idle",
}
_LEAST_WIDTH = 20
"""Columns of time, however narrow the terminal."""
_MAX_NUMBERS = 16
"""Characters of rank numbers before a line."""


def draw_gantt(
    plan: Plan, simulation: Simulation, *, device_types: Sequence[str] = (), width: int = 100
) -> str:
    """One line per rank, `width` characters with its label; ranks of a group that do the same at the same
    times share one.

    A column shows what took most of its time: a forward as the ministage's small letter, its backward as
    the capital, an update, else the communication or copy that the rank waits for, else a dot. Spans were
    recorded; `device_types`, of each rank, are for the labels.
    """
    merged = _merge_equal(plan, simulation, device_types)
    labels = [_label(ranks, device_types) for ranks, _ in merged]
    label_width = max(map(len, labels)) + 2
    num_columns = max(_LEAST_WIDTH, width - label_width)
    column_s = simulation.iteration_s / num_columns
    lines = [_draw_line(spans, column_s, num_columns) for _, spans in merged]
    drawn = [f"{label.ljust(label_width)}{line}" for label, line in zip(labels, lines, strict=True)]
    axis = " " * label_width + _draw_axis(simulation.iteration_s, num_columns)
    legend = _explain(plan, {mark for line in lines for mark in line}, column_s)
    return "\n".join([axis, *drawn, "", *textwrap.wrap(legend, max(width, _LEAST_WIDTH))])


def _merge_equal(
    plan: Plan, simulation: Simulation, device_types: Sequence[str]
) -> list[tuple[tuple[int, ...], list[Span]]]:
    """Ranks of one group and device type that do the same at the same times, by their first rank."""
    by_rank: defaultdict[int, list[Span]] = defaultdict(list)
    for span in simulation.folded_spans():
        by_rank[span.rank].append(span)
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank in sorted(plan.group_of_rank):
        device_type = device_types[rank] if device_types else ""
        activity = sorted(_describe(span, simulation.iteration_s) for span in by_rank[rank])
        alike[plan.group_of_rank[rank], device_type, *activity].append(rank)
    return [(tuple(ranks), by_rank[ranks[0]]) for ranks in alike.values()]


def _describe(span: Span, iteration_s: float) -> tuple[str, str, int, int, int]:
    """What is equal in spans of ranks that do the same; times to a billionth of the step."""
    start, stop = (round(seconds / iteration_s * 1e9) for seconds in (span.start_s, span.stop_s))
    return span.track, span.action.kind.value, span.action.ministage or 0, start, stop


_Seconds = defaultdict[str, float]
"""By mark, in one column."""


def _draw_line(spans: Iterable[Span], column_s: float, num_columns: int) -> str:
    columns = [(_Seconds(float), _Seconds(float)) for _ in range(num_columns)]
    """Of computation, and of communication and copies."""
    for span in spans:
        moves = span.track not in ("compute", "update")
        for column in range(max(0, int(span.start_s / column_s)), num_columns):
            start = max(span.start_s, column * column_s)
            stop = min(span.stop_s, (column + 1) * column_s)
            if stop <= start:
                break
            columns[column][moves][_mark(span)] += stop - start
    return "".join(_choose(*column, column_s) for column in columns)


def _mark(span: Span) -> str:
    if span.track != "compute":
        return _MARKS[span.track]
    letters = ascii_lowercase if span.action.kind is Kind.F else ascii_uppercase
    return letters[(span.action.ministage or 0) % len(letters)]


def _choose(works: Mapping[str, float], moves: Mapping[str, float], column_s: float) -> str:
    """Mark of a column: computation if it takes half of it, else whatever else does."""
    for seconds in (works, moves):
        if seconds and sum(seconds.values()) >= column_s / 2:
            return max(seconds, key=lambda mark: seconds[mark])
    return IDLE


def _label(ranks: Sequence[int], device_types: Sequence[str]) -> str:
    numbers = show_numbers(ranks)
    if len(numbers) > _MAX_NUMBERS:
        numbers = f"{ranks[0]} and {len(ranks) - 1} alike"
    return f"{numbers} {device_types[ranks[0]]}" if device_types else numbers


def _draw_axis(iteration_s: float, num_columns: int) -> str:
    """Seconds at every quarter; the last number ends at its place."""
    axis = " " * num_columns
    for quarter in range(4):
        text = f"|{iteration_s * quarter / 4:.3g}"
        at = num_columns * quarter // 4
        axis = axis[:at] + text + axis[at + len(text) :]
    end = f"{iteration_s:.3g} s|"
    return axis[: num_columns - len(end)] + end


def _explain(plan: Plan, used: Set[str], column_s: float) -> str:
    last = min(plan.num_ministages, len(ascii_lowercase)) - 1
    to_last = f" ... {ascii_lowercase[last]} and {ascii_uppercase[last]} of {last}" if last else ""
    again = f", then a again for {last + 1}" if plan.num_ministages > last + 1 else ""
    marks = "".join(f", {mark} {meaning}" for mark, meaning in _MEANINGS.items() if mark in used)
    return (
        f"a and A forward and backward of ministage 0{to_last}{again}{marks}; "
        f"a column is {_show_seconds(column_s)}"
    )


def _show_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
