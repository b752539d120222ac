"""Layers and rows of every card beside its speed and memory, and memory over time against its limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zorselike.simulator.html.shown import ShownRank, follow_memory
from zorselike.simulator.html.style import (
    FAINT,
    group_color,
    keep_digits,
    label_lines,
    make_figure,
    text_color,
)
from zorselike.simulator.html.timeline import put_legend_above
from zorselike.simulator.simulated_plan import SimulatedPlan
from zorselike.text.units import GIB
from zorselike.text.wording import show_numbers

_MAX_CURVES = 8
"""Of memory in one figure, the fullest."""
_LEGEND_WIDE = 4

HOVER = (
    ("rank", "@rank, @device of node @node"),
    ("group", "@group; ministages @ministages"),
    ("layers", "@layers modules: @modules"),
    ("rows", "@rows, @microbatches microbatches of at most @most"),
    ("speed", "@speed{0.000} rows/s of the whole model"),
    ("computes", "@busy{0.0%} of the step"),
    ("memory", "@memory{0.00} of @limit{0.00} GiB, @fullness{0.0%}"),
)
"""What is told of a card wherever it is drawn."""


def list_cards(
    simulated: SimulatedPlan, ranks: Sequence[int], speeds: Sequence[float]
) -> dict[str, list[Any]]:
    """Columns with what is known of each of these ranks; `speeds` of all (`simulator/report/speeds.py`)."""
    plan, places = simulated.plan, simulated.costs.places
    rows = []
    for rank in ranks:
        microbatches = plan.microbatches_of_rank(rank)
        ministages = plan.ministages_of_rank(rank)
        modules = [name for number in ministages for name in plan.ministages[number].modules]
        limit, peak = simulated.limit_bytes(rank), simulated.peak_bytes[rank]
        rows.append(
            {
                "rank": rank,
                "device": simulated.device_types[rank],
                "node": simulated.cluster.nodes[places[rank].node].name,
                "group": plan.group_of_rank[rank],
                "ministages": show_numbers(ministages),
                "layers": len(modules),
                "modules": modules[0] if len(modules) == 1 else f"{modules[0]} .. {modules[-1]}",
                "rows": sum(microbatch.num_rows for microbatch in microbatches),
                "microbatches": len(microbatches),
                "most": max((microbatch.num_rows for microbatch in microbatches), default=0),
                "speed": keep_digits(speeds[rank]),
                "busy": keep_digits(
                    simulated.simulation.ranks[rank].busy_s / simulated.simulation.iteration_s
                ),
                "memory": keep_digits(peak / GIB),
                "limit": None if limit is None else keep_digits(limit / GIB),
                "fullness": None if limit is None else keep_digits(peak / limit),
                "color": group_color(plan.group_of_rank[rank]),
                "ink": text_color(plan.group_of_rank[rank]),
            }
        )
    return {key: [row[key] for row in rows] for key in rows[0]}


def draw_cards(simulated: SimulatedPlan, shown: Sequence[ShownRank], speeds: Sequence[float]) -> Any:
    """Four figures side by side with a line for each card."""
    from bokeh.layouts import row
    from bokeh.models import ColumnDataSource, Range1d

    columns = list_cards(simulated, [each.rank for each in shown], speeds)
    columns["y"] = [-number for number in range(len(shown))]
    source = ColumnDataSource(columns, name="cards data")
    lines = Range1d(-len(shown) + 0.5, 0.5)
    labels = {
        "layers": "layers (modules)",
        "rows": "rows of a step",
        "speed": "speed: rows/s of the whole model",
        "memory": "memory at its peak, of the card's, GiB",
    }
    figures = []
    for key, label in labels.items():
        made = make_figure(
            height=max(150, 80 + 18 * len(shown)),
            hover=HOVER,
            y_range=lines,
            x_range=Range1d(0, 1.05 * max([1e-9, *(columns[key]), *_limits(columns, key)])),
            x_axis_label=label,
            name=f"cards {key}",
        )
        made.toolbar_location = None
        if key == "memory":
            made.hbar(y="y", right="limit", height=0.78, color="#e7eaee", line_color=FAINT, source=source)
        made.hbar(y="y", right=key, height=0.6, color="color", source=source)
        label_lines(made, [each.label for each in shown])
        made.yaxis.visible = key == "layers"
        figures.append(made)
    figures[0].min_border_left = 150
    return row(figures, sizing_mode="stretch_width")


def _limits(columns: dict[str, list[Any]], key: str) -> list[float]:
    return [limit for limit in columns["limit"] if limit is not None] if key == "memory" else []


def draw_memory(simulated: SimulatedPlan, x_range: Any) -> Any:
    """Memory in use on the fullest card of each group and type of device, each against its limit."""
    curves = _choose_curves(simulated)
    made = make_figure(
        height=330 + 24 * -(-len(curves) // _LEGEND_WIDE),
        hover=[
            ("", "$name"),
            ("at", "@start{0.000000} s"),
            ("in use", "@memory{0.000} GiB"),
            ("of", "@limit GiB"),
        ],
        x_range=x_range,
        x_axis_label="seconds since the step began",
        y_axis_label="GiB in use on the card",
        name="memory",
    )
    made.y_range.start = 0
    for rank in curves:
        group, device = simulated.plan.group_of_rank[rank], simulated.device_types[rank]
        seconds, sizes = follow_memory(simulated, rank)
        limit = simulated.limit_bytes(rank)
        name = f"rank {rank}, {device} of group {group}"
        gib = None if limit is None else keep_digits(limit / GIB)
        made.step(
            x="start",
            y="memory",
            mode="after",
            line_width=1.6,
            color=group_color(group),
            name=name,
            legend_label=name,
            source={
                "start": [keep_digits(each) for each in seconds],
                "memory": [keep_digits(size / GIB) for size in sizes],
                "limit": [gib] * len(seconds),
            },
        )
        if gib is not None:
            made.line(
                x="start",
                y="memory",
                line_dash="dashed",
                line_width=1.2,
                color=group_color(group),
                name=f"limit of {name}",
                legend_label=name,
                source={
                    "start": [0.0, keep_digits(simulated.simulation.iteration_s)],
                    "memory": [gib, gib],
                    "limit": [gib, gib],
                },
            )
    put_legend_above(made)
    made.legend.click_policy = "hide"
    made.legend.ncols = _LEGEND_WIDE
    return made


def _choose_curves(simulated: SimulatedPlan) -> list[int]:
    """The fullest rank of each group and type of device, the first of these where there are many."""
    fullest: dict[tuple[int, str], int] = {}
    for rank in range(simulated.plan.num_ranks):
        key = simulated.plan.group_of_rank[rank], simulated.device_types[rank]
        if key not in fullest or simulated.peak_bytes[rank] > simulated.peak_bytes[fullest[key]]:
            fullest[key] = rank
    chosen = sorted(fullest.values(), key=lambda rank: -_fullness(simulated, rank))[:_MAX_CURVES]
    return sorted(chosen)


def _fullness(simulated: SimulatedPlan, rank: int) -> float:
    return simulated.peak_bytes[rank] / (simulated.limit_bytes(rank) or 1)
