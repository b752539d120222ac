"""The step as a timeline, a line for each rank, and where each rank's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zorselike.schedule.actions import Kind
from zorselike.simulator.html.shown import Bar, ShownRank, list_bars
from zorselike.simulator.html.style import keep_digits, label_lines, make_figure, ministage_color
from zorselike.simulator.report.picture import BARS
from zorselike.simulator.simulated_plan import SimulatedPlan

_LINE = 30
"""Pixels of a rank's line."""
_PARTS: Mapping[str, tuple[str, str]] = {
    "busy_s": ("computing", "#3b7dd8"),
    "waiting_for_data_s": ("waiting for other groups' rows", "#e0a63a"),
    "exposed_communication_s": ("communication that nothing hides", "#c2513f"),
    "exposed_copies_s": ("copies that nothing hides", "#8e44ad"),
}
"""Attributes of `RankTimes` that add up to the step, in words, and their colours."""


def draw_timeline(simulated: SimulatedPlan, shown: Sequence[ShownRank]) -> tuple[Any, str]:
    """The figure, and a sentence on what of it was joined."""
    from bokeh.models import ColumnDataSource, Range1d

    iteration_s = simulated.simulation.iteration_s
    bars, pixel_s = list_bars(simulated, shown)
    line_of = {each.rank: -number for number, each in enumerate(shown)}
    made = make_figure(
        height=max(160, 90 + _LINE * len(shown)),
        hover=[
            ("", "@action"),
            ("rank", "@rank"),
            ("what", "@track"),
            ("from", "@start{0.000000} s"),
            ("for", "@milliseconds{0,0.000} ms"),
        ],
        x_range=Range1d(0, iteration_s, bounds=(0, iteration_s)),
        y_range=Range1d(-len(shown) + 0.5, 0.5),
        x_axis_label="seconds since the step began",
        name="timeline",
    )
    tops = [line_of[bar.rank] - 0.5 + BARS[bar.track][0] for bar in bars]
    heights = [BARS[bar.track][1] for bar in bars]
    source = ColumnDataSource(
        {
            "start": [keep_digits(bar.start_s, 9) for bar in bars],
            "stop": [keep_digits(bar.stop_s, 9) for bar in bars],
            "bottom": [round(top, 2) for top in tops],
            "top": [round(top + height, 2) for top, height in zip(tops, heights, strict=True)],
            "color": [_color(bar) for bar in bars],
            "action": [_name(bar) for bar in bars],
            "rank": [bar.rank for bar in bars],
            "track": [bar.track for bar in bars],
            "milliseconds": [keep_digits(1000 * (bar.stop_s - bar.start_s)) for bar in bars],
        },
        name="timeline data",
    )
    made.quad(
        left="start", right="stop", bottom="bottom", top="top", color="color", line_width=0, source=source
    )
    label_lines(made, [each.label for each in shown])
    return made, _describe(bars, pixel_s, simulated, shown)


def _color(bar: Bar) -> str:
    if bar.track != "compute":
        return BARS[bar.track][2]
    action = bar.span.action
    return ministage_color(action.ministage or 0, is_backward=action.kind is Kind.B)


def _name(bar: Bar) -> str:
    text = bar.span.action.text
    return text if bar.number == 1 else f"{text} and {bar.number - 1} more"


def _describe(
    bars: Sequence[Bar], pixel_s: float, simulated: SimulatedPlan, shown: Sequence[ShownRank]
) -> str:
    sentences = []
    if len(shown) < simulated.plan.num_ranks:
        sentences.append(
            f"{len(shown)} of {simulated.plan.num_ranks} ranks are drawn: the busiest of each group and type "
            "of device."
        )
    if pixel_s:
        number = sum(bar.number for bar in bars)
        sentences.append(
            f"{number:,} actions are drawn as {len(bars):,} bars: neighbours shorter than "
            f"{1000 * pixel_s:.3g} ms, about a pixel of the whole step, are one. --trace has each by itself."
        )
    return " ".join(sentences)


def draw_time_use(simulated: SimulatedPlan, shown: Sequence[ShownRank]) -> Any:
    """Stacked bars: what each rank's step is made of."""
    from bokeh.models import ColumnDataSource, Range1d

    iteration_s = simulated.simulation.iteration_s
    columns: dict[str, list[Any]] = {
        key: [] for key in ("y", "left", "right", "what", "seconds", "share", "rank", "color")
    }
    for number, each in enumerate(shown):
        left = 0.0
        times = simulated.simulation.ranks[each.rank]
        for attribute, (what, color) in _PARTS.items():
            seconds = getattr(times, attribute)
            values = (-number, left, left + seconds, what, seconds, seconds / iteration_s, each.rank, color)
            for key, value in zip(columns, values, strict=True):
                columns[key].append(keep_digits(value) if isinstance(value, float) else value)
            left += seconds
    made = make_figure(
        height=max(180, 110 + 18 * len(shown)),
        hover=[("rank", "@rank"), ("", "@what"), ("", "@seconds{0.0000} s, @share{0.0%} of the step")],
        x_range=Range1d(0, iteration_s),
        y_range=Range1d(-len(shown) + 0.5, 0.5),
        x_axis_label="seconds of a step",
        name="time",
    )
    source = ColumnDataSource(columns, name="time data")
    made.hbar(
        y="y", left="left", right="right", height=0.72, color="color", legend_field="what", source=source
    )
    label_lines(made, [each.label for each in shown])
    put_legend_above(made)
    return made


def put_legend_above(made: Any) -> None:
    """Out of the way of what is drawn, in a row."""
    legend = made.legend[0]
    legend.orientation = "horizontal"
    legend.border_line_color = None
    made.add_layout(legend, "above")
