"""The page: its sections, and the one file that they make."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from zorselike.errors import ConfigError, FileError
from zorselike.simulator.html.found import Search
from zorselike.simulator.report.limits import describe_limit
from zorselike.simulator.report.page import describe_job, format_report
from zorselike.simulator.simulated_plan import Baseline, SimulatedPlan
from zorselike.text.files import write_text

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1f2733; max-width: 1500px; margin: 0 auto;
  padding: 0 24px 60px }
h1 { font-size: 20px; margin: 26px 0 4px } h2 { font-size: 16px; margin: 34px 0 4px }
p { margin: 4px 0 8px; max-width: 110ch } .faint { color: #6b7684 }
.numbers { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0 }
.numbers div { border: 1px solid #dfe4ea; border-radius: 8px; padding: 8px 14px; min-width: 120px }
.numbers b { display: block; font-size: 20px; font-weight: 600 }
.numbers span { color: #6b7684; font-size: 12px }
table { border-collapse: collapse; margin: 8px 0 }
td, th { padding: 3px 14px 3px 0; text-align: left; font-weight: 400 }
th { color: #6b7684 } td.number { text-align: right; font-variant-numeric: tabular-nums }
tr.own td { font-weight: 600 }
pre { font: 12px/1.35 ui-monospace, monospace; overflow-x: auto }
pre { background: #f5f7fa; padding: 12px; border-radius: 8px }
"""
_HOW = "Drag to zoom in, Ctrl and wheel to zoom; the arrows above a figure show all of it again."


def save_page(
    simulated: SimulatedPlan,
    path: str | Path,
    *,
    baselines: Sequence[Baseline],
    speeds: Sequence[float],
    ideal_s: float,
    notes: Sequence[str] = (),
    search: Search | None = None,
    text: str | None = None,
) -> None:
    """Writes the page of a step whose spans were recorded.

    Args:
        baselines: what others would do with the same devices.
        speeds: rows per second of each rank (`simulator/report/speeds.py`).
        ideal_s: the step if all devices computed all the time.
        notes: what a reader must know before any number.
        search: how the plan was found, if it was.
        text: the same as text, to be unfolded at the end; unless given, `zorselike simulate`'s page.

    Raises:
        ConfigError: Bokeh is not installed, or the file cannot be written.
    """
    check_bokeh()
    text = text or format_report(simulated, baselines, ideal_s=ideal_s, notes=notes)
    page = _assemble(simulated, baselines, speeds, ideal_s, notes, search, text)
    try:
        write_text(path, page)
    except FileError as error:
        raise ConfigError(f"{path}: the page cannot be written: {error}") from None


def check_bokeh() -> None:
    """Raises `ConfigError` if what draws the page is not installed."""
    try:
        import bokeh  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "a page needs Bokeh, which is not installed: pip install 'zorselike[html]'"
        ) from None


def _assemble(
    simulated: SimulatedPlan,
    baselines: Sequence[Baseline],
    speeds: Sequence[float],
    ideal_s: float,
    notes: Sequence[str],
    search: Search | None,
    text: str,
) -> str:
    from bokeh.embed import components
    from bokeh.resources import Resources

    sections = _draw(simulated, baselines, speeds, search)
    figures = {title: figure for title, figure, _ in sections if figure is not None}
    script, places = components(figures)
    body = [_write_head(simulated, baselines, ideal_s, notes)]
    for title, figure, told in sections:
        body.append(f"<h2>{escape(title)}</h2>")
        body += [f'<p class="faint">{escape(sentence)}</p>' for sentence in told if sentence]
        body += [str(places[title])] if figure is not None else []
    body.append(f"<h2>As text</h2><details><summary>unfold</summary><pre>{escape(text)}</pre></details>")
    library = Resources(mode="inline", components=["bokeh"]).render_js()
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f"<title>{escape(simulated.workload.model)}: {_show_step(simulated)}</title>",
            f"<style>{_STYLE}</style>",
            "</head>\n<body>",
            *body,
            str(library),  # After what is text, which is then read while figures are drawn.
            str(script),
            "</body>\n</html>\n",
        ]
    )


_Section = tuple[str, Any, tuple[str, ...]]
"""A heading, a figure, and sentences before it."""


def _draw(
    simulated: SimulatedPlan, baselines: Sequence[Baseline], speeds: Sequence[float], search: Search | None
) -> list[_Section]:
    from zorselike.simulator.html.cards import draw_cards, draw_memory
    from zorselike.simulator.html.cluster_map import draw_cluster, draw_links
    from zorselike.simulator.html.found import draw_search
    from zorselike.simulator.html.shown import choose_ranks
    from zorselike.simulator.html.timeline import draw_time_use, draw_timeline

    shown = choose_ranks(simulated)
    cluster, nodes_left_out = draw_cluster(simulated, speeds)
    links, links_left_out = draw_links(simulated)
    timeline, joined = draw_timeline(simulated, shown)
    memory = draw_memory(simulated, timeline.x_range)
    colors = (
        "On the thick line of a rank a colour is a ministage, darker its backward; below it are collectives "
        "(orange, red), rows sent and received (green), copies to and from the host (violet)."
    )
    sections: list[_Section] = [
        (
            "The cluster",
            cluster,
            (
                "Squares are cards, in the colour of their group; grey ones the plan leaves out. The small "
                "squares of a node are its network card out and in, lines are links: green is idle, red is "
                "full.",
                nodes_left_out,
            ),
        ),
        ("Links, and what crosses them", links, (links_left_out,)),
        (
            "Layers and rows of every card, beside its speed and memory",
            draw_cards(simulated, shown, speeds),
            (),
        ),
        ("The step", timeline, (colors, _HOW, joined)),
        (
            "Memory over time",
            memory,
            (
                "The fullest card of each group and type of device, and its limit, dashed. Click a name to "
                "hide it.",
            ),
        ),
        ("Where the time goes", draw_time_use(simulated, shown), ()),
    ]
    if search is not None and search.found:
        levels = [
            (other.name, other.simulated.simulation.iteration_s)
            for other in baselines
            if other.simulated is not None
        ]
        sections.append(("Plans found, against time", draw_search(search, levels), ()))
    return sections


# -- numbers and sentences ---------------------------------------------------------------------


def _show_step(simulated: SimulatedPlan) -> str:
    return f"{simulated.simulation.iteration_s:.4g} s per step"


def _write_head(
    simulated: SimulatedPlan, baselines: Sequence[Baseline], ideal_s: float, notes: Sequence[str]
) -> str:
    simulation = simulated.simulation
    numbers = [
        (f"{simulation.iteration_s:.4g} s", "per step"),
        (f"{simulated.tokens_per_s:,.0f}", "tokens/s"),
        (f"{ideal_s / simulation.iteration_s:.1%}", "of the ideal, if all devices computed all the time"),
        (
            f"{max(_find_fullness(simulated, rank) for rank in range(simulated.plan.num_ranks)):.0%}",
            "memory of the fullest card",
        ),
    ]
    if simulation.cost:
        numbers.append((f"{simulation.cost:.4g} {simulated.costs.currency}", "per step"))
    boxes = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in numbers
    )
    sentences = [describe_job(simulated), *notes, *describe_limit(simulated)]
    where = escape(simulated.cluster.name or "the cluster")
    return (
        f"<h1>{escape(simulated.workload.model)} on {where}, simulated</h1>"
        + "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences[:1])
        + f'<div class="numbers">{boxes}</div>'
        + "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences[1:])
        + _compare(simulated, baselines)
    )


def _find_fullness(simulated: SimulatedPlan, rank: int) -> float:
    return simulated.peak_bytes[rank] / (simulated.limit_bytes(rank) or float("inf"))


def _compare(simulated: SimulatedPlan, baselines: Sequence[Baseline]) -> str:
    """This plan and others, a row each."""
    rows = [_write_row("this plan", simulated, "", is_own=True)]
    for other in baselines:
        if other.simulated is None:
            rows.append(f"<tr><td>{escape(other.name)}<td><td><td>{escape(other.reason)}")
            continue
        ratio = other.simulated.simulation.iteration_s / simulated.simulation.iteration_s
        rows.append(_write_row(other.name, other.simulated, f"plan is {ratio:.2f} x as fast ({other.how})"))
    return "<table><tr><th><th>s per step<th>tokens/s<th>" + "".join(rows) + "</table>"


def _write_row(name: str, simulated: SimulatedPlan, told: str, *, is_own: bool = False) -> str:
    return (
        f"<tr{' class=own' if is_own else ''}><td>{escape(name)}"
        f"<td class=number>{simulated.simulation.iteration_s:.4g}"
        f"<td class=number>{simulated.tokens_per_s:,.0f}"
        f"<td>{escape(told)}"
    )
