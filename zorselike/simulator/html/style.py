"""Colours and figures of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BACKWARD_SHADE = 0.62
"""Brightness of a backward, of the forward's colour."""
OTHERS = "#d4d8de"
"""Colour of what the plan does not use."""
INK, FAINT = "#1f2733", "#6b7684"


def make_figure(
    *,
    hover: Sequence[tuple[str, str]] = (),
    zooms: str = "width",
    sizing_mode: str = "stretch_width",
    **options: Any,
) -> Any:
    """A figure, as wide as the page unless told otherwise.

    Dragging zooms, the wheel with Ctrl too; `zooms`: the axis that does, or `both`; `hover` names what the
    mouse shows of everything drawn.
    """
    from bokeh.models import BoxZoomTool, HoverTool, PanTool, ResetTool, SaveTool, WheelZoomTool
    from bokeh.plotting import figure

    box, wheel = BoxZoomTool(dimensions=zooms), WheelZoomTool(dimensions=zooms, modifiers={"ctrl": True})
    tools = [box, wheel, PanTool(dimensions=zooms), ResetTool(), SaveTool()]
    if hover:
        tools.append(HoverTool(tooltips=list(hover)))
    made = figure(
        sizing_mode=sizing_mode,
        tools=tools,
        toolbar_location="above",
        output_backend="canvas",
        **options,
    )
    made.toolbar.logo = None
    made.toolbar.active_drag = box
    made.toolbar.active_scroll = wheel
    made.axis.axis_label_text_font_style = "normal"
    made.axis.axis_label_text_color = made.axis.major_label_text_color = INK
    made.outline_line_color = None
    return made


def group_color(group: int) -> str:
    """One of twenty, ten strong ones and ten light ones."""
    from bokeh.palettes import Category10_10, Category20_20

    palette = [*Category10_10, *Category20_20[1::2]]
    return str(palette[group % len(palette)])


def text_color(group: int) -> str:
    """Of text on a group's colour: the second ten are light."""
    return "white" if group % 20 < 10 else INK


def ministage_color(ministage: int, *, is_backward: bool) -> str:
    """One of ten colours, darker for the backward."""
    from bokeh.colors import RGB
    from bokeh.palettes import Category10_10

    color = str(Category10_10[ministage % 10]).lstrip("#")
    shade = BACKWARD_SHADE if is_backward else 1.0
    red, green, blue = (round(shade * int(color[i : i + 2], 16)) for i in (0, 2, 4))
    return str(RGB(red, green, blue).to_hex())


def keep_digits(value: float, digits: int = 6) -> float:
    """Rounded to so many significant digits, which is what the page embeds."""
    return float(f"{value:.{digits}g}")


def label_lines(made: Any, labels: Sequence[str]) -> None:
    """Names lines 0, 1, ... from the top of a figure whose y runs downward as 0, -1, ..."""
    made.yaxis.ticker = [-number for number in range(len(labels))]
    made.yaxis.major_label_overrides = {-number: label for number, label in enumerate(labels)}
    made.ygrid.grid_line_color = None
    made.yaxis.major_tick_line_color = None
