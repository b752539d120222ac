"""Pictures of the reproduced figures, by matplotlib (the `viz` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .figures import Figure, Panel
from .study import Cell

_BAR_SHARE = 0.8
"""Of the room for a label."""
FAR = 3.0
"""Series whose largest values differ by more have an axis each."""


def draw_figures(figures: list[Figure], folder: Path) -> list[Path]:
    """A PNG for each; raises `ImportError` where matplotlib is not installed."""
    return [draw_figure(figure, folder / f"{figure.key}.png") for figure in figures]


def draw_figure(figure: Figure, path: Path) -> Path:
    """One figure, its panels side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(
        1, len(figure.panels), figsize=(5 * len(figure.panels), 4), squeeze=False, layout="constrained"
    )
    for panel, axis in zip(figure.panels, axes[0], strict=True):
        _draw_panel(panel, axis)
    drawing.suptitle(figure.title)
    drawing.legend(*_list_legend(drawing), loc="outside lower center", ncols=4, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)
    return path


def _draw_panel(panel: Panel, axis: Any) -> None:
    """Bars beside each other; a series of other sizes than the first has an axis of its own."""
    tops = {
        name: max((v for v in values if v is not None), default=0.0) for name, values in panel.series.items()
    }
    width = _BAR_SHARE / len(panel.series)
    first = next(iter(panel.series))
    for number, (name, values) in enumerate(panel.series.items()):
        is_far = number > 0 and tops[name] > 0 and not 1 / FAR < tops[first] / tops[name] < FAR
        target = axis.twinx() if is_far else axis
        places = [i - _BAR_SHARE / 2 + (number + 0.5) * width for i in range(len(panel.labels))]
        target.bar(places, [v or 0.0 for v in values], width, label=name, color=f"C{number}")
        for place, value in zip(places, values, strict=True):
            if value is None:
                target.text(place, 0.0, "OOM", rotation=90, ha="center", va="bottom", fontsize=8)
        if is_far:
            target.set_ylabel(name)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xticks(range(len(panel.labels)), panel.labels, rotation=20, ha="right", fontsize=8)


def _list_legend(drawing: Any) -> tuple[list[Any], list[str]]:
    """Each series once, whichever panels it is in."""
    handles: list[Any] = []
    labels: list[str] = []
    for other in drawing.axes:
        for handle, label in zip(*other.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    return handles, labels


def table_5_panels(cells: list[Cell]) -> Figure:
    """Table 5 as bars: simulated, measured by the authors, and the compute-bound limit."""
    panels = []
    for cluster in dict.fromkeys(cell.cluster for cell in cells):
        own = [cell for cell in cells if cell.cluster == cluster]
        panels.append(
            Panel(
                f"cluster {cluster}, TFLOP/s",
                tuple(f"Llama {cell.model}" for cell in own),
                {
                    "simulated": tuple(None if c.outcome is None else c.outcome.tflops for c in own),
                    "paper": tuple(c.paper.tflops for c in own),
                    "compute-bound": tuple(c.bound_tflops for c in own),
                },
            )
        )
    return Figure("table_5", "Zorse's cells of Table 5", tuple(panels))
