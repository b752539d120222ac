"""A simulated step as a picture: a row per rank, with computation, communication and copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zorselike.errors import ConfigError
from zorselike.schedule.actions import Kind
from zorselike.simulator.result import Span, Track
from zorselike.simulator.simulated_plan import SimulatedPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS: dict[Track, tuple[float, float, str]] = {
    "compute": (0.38, 0.54, ""),
    "update": (0.38, 0.54, "#555555"),
    "gather": (0.26, 0.1, "#d08a00"),
    "reduce": (0.26, 0.1, "#a03c00"),
    "send": (0.14, 0.1, "#0a7a6c"),
    "receive": (0.14, 0.1, "#4db6a8"),
    "to device": (0.02, 0.1, "#8e44ad"),
    "to host": (0.02, 0.1, "#c39bd3"),
}
"""Bottom, height and colour of each track's bar in a rank's row, which is 1 high."""
_BACKWARD_SHADE = 0.62
"""Brightness of a backward, of the forward's colour."""
_INCHES_PER_RANK = 0.45
_WIDTH_INCHES = 14.0
_MOST_INCHES = 60.0


def save_picture(simulated: SimulatedPlan, path: str | Path) -> None:
    """Draws a step whose spans were recorded; the suffix of `path` is the format. Raises `ConfigError` if
    matplotlib is not installed, or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed: pip install 'zorselike[viz]'"
        ) from None
    height = min(_MOST_INCHES, 1.6 + _INCHES_PER_RANK * simulated.plan.num_ranks)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    draw_timeline(figure, simulated)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the picture cannot be written: {error}") from None


def draw_timeline(figure: Figure, simulated: SimulatedPlan) -> None:
    """A row per rank, the first on top: computation in its ministage's colour, the rest below."""
    axes = figure.subplots()
    num_ranks = simulated.plan.num_ranks
    bars: defaultdict[tuple[int, Track, str], list[tuple[float, float]]] = defaultdict(list)
    for span in simulated.simulation.folded_spans():
        if span.track in BARS:
            bars[span.rank, span.track, _color(span)].append((span.start_s, span.stop_s - span.start_s))
    for (rank, track, color), intervals in bars.items():
        bottom, height, _ = BARS[track]
        axes.broken_barh(intervals, (num_ranks - 1 - rank + bottom, height), facecolors=color, linewidth=0)
    iteration_s = simulated.simulation.iteration_s
    axes.set_xlim(0, iteration_s)
    axes.set_ylim(0, num_ranks)
    axes.set_xlabel("seconds")
    labels = [f"{rank}  {device_type}" for rank, device_type in enumerate(simulated.device_types)]
    axes.set_yticks([num_ranks - 0.4 - rank for rank in range(num_ranks)], labels)
    speed = f"{iteration_s:.4g} s per step, {simulated.tokens_per_s:,.0f} tokens/s"
    axes.set_title(f"{simulated.workload.model}: {speed} (simulated)")
    _add_legend(figure, axes, simulated, {track for _, track, _ in bars})


def _color(span: Span) -> str:
    if span.track != "compute":
        return BARS[span.track][2]
    return _ministage_color(span.action.ministage or 0, is_backward=span.action.kind is Kind.B)


def _ministage_color(ministage: int, *, is_backward: bool) -> str:
    """One of ten colours, darker for the backward."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shade = _BACKWARD_SHADE if is_backward else 1.0
    red, green, blue, _ = colormaps["tab10"](ministage % 10)
    return str(to_hex((red * shade, green * shade, blue * shade)))


def _add_legend(figure: Figure, axes: Axes, simulated: SimulatedPlan, tracks: Set[Track]) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=_ministage_color(0, is_backward=False), label="forward of ministage 0"),
        Patch(color=_ministage_color(0, is_backward=True), label="its backward"),
    ]
    if simulated.plan.num_ministages > 1:
        handles.append(Patch(color=_ministage_color(1, is_backward=False), label="ministage 1, and so on"))
    bars = ((track, color) for track, (_, _, color) in BARS.items() if color and track in tracks)
    handles += [Patch(color=color, label=track) for track, color in bars]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
