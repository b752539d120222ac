"""How the best plan of a search moved over time, beside what other systems would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zorselike.simulator.html.style import FAINT, keep_digits, make_figure
from zorselike.simulator.html.timeline import put_legend_above


@dataclass(frozen=True)
class FoundPlan:
    """The best plan of a search from a moment on."""

    elapsed_s: float
    iteration_s: float
    num_simulated: int


@dataclass(frozen=True, kw_only=True)
class Search:
    """What the page shows of a search."""

    found: Sequence[FoundPlan]
    """Each better than the one before, or by another measure."""
    end_s: float
    bound_s: float
    """No plan of any of the devices takes less; 0 if nothing is proven."""


def draw_search(search: Search, baselines: Sequence[tuple[str, float]]) -> Any:
    """Steps of the best plan so far, the proven bound, and a line for each baseline of name and seconds."""
    from bokeh.models import ColumnDataSource

    made = make_figure(
        height=340,
        hover=[
            ("", "@name"),
            ("after", "@elapsed{0.00} s of search"),
            ("", "@step{0.0000} s per step"),
            ("", "@more"),
        ],
        zooms="both",
        x_axis_label="seconds of search",
        y_axis_label="seconds of a step",
        name="search",
    )
    steps = [
        *search.found,
        FoundPlan(search.end_s, search.found[-1].iteration_s, search.found[-1].num_simulated),
    ]
    columns = {
        "elapsed": [keep_digits(each.elapsed_s) for each in steps],
        "step": [keep_digits(each.iteration_s) for each in steps],
        "name": ["best plan found"] * len(steps),
        "more": [f"{each.num_simulated} plans simulated by then" for each in steps],
    }
    source = ColumnDataSource(columns, name="search data")
    made.step(
        x="elapsed",
        y="step",
        mode="after",
        line_width=2,
        color="#3b7dd8",
        source=source,
        legend_label="best found",
    )
    made.scatter(x="elapsed", y="step", size=7, color="#3b7dd8", source=source)
    colors = ("#c2513f", "#e0a63a", "#8e44ad", "#0a7a6c", "#b65d9a", "#7a5c2e", "#4d6a8c")
    levels = [(name, seconds, colors[i % len(colors)]) for i, (name, seconds) in enumerate(baselines)]
    if search.bound_s:
        levels.append(("proven: no plan takes less", search.bound_s, FAINT))
    for name, seconds, color in levels:
        own = {
            "elapsed": [0.0, keep_digits(search.end_s)],
            "step": [keep_digits(seconds)] * 2,
            "name": [name] * 2,
            "more": [""] * 2,
        }
        made.line(
            x="elapsed",
            y="step",
            line_dash="dashed",
            line_width=1.6,
            color=color,
            source=own,
            legend_label=name,
        )
    made.y_range.start = 0
    put_legend_above(made)
    made.legend.click_policy = "hide"
    made.legend.ncols = 4
    return made
