"""The cluster: nodes by zone with their cards, coloured by group, the links between them, and what
crosses these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zorselike.simulator.html.cards import HOVER, list_cards
from zorselike.simulator.html.style import FAINT, INK, OTHERS, keep_digits, make_figure
from zorselike.simulator.report.limits import find_link_shares
from zorselike.simulator.simulated_plan import SimulatedPlan
from zorselike.text.wording import count

_MAX_NODES = 96
"""Nodes that are drawn; those without a rank go first."""
_MAX_LINKS = 24
"""Links that are listed, the fullest."""
_CARDS_WIDE = 8
"""Cards side by side in a node."""
_NODES_HIGH = 8
"""Nodes on top of each other, in a column of a zone."""
_MOST_SCALE, _MOST_WIDTH = 38.0, 1400.0
"""Pixels of a card, and of the map."""
_TOOLBAR = 30
"""Pixels beside the map."""
_GAP, _LABEL = 0.9, 0.75
"""Between nodes and zones, and for a name, in widths of a card."""


@dataclass(frozen=True)
class _Box:
    """A node on the map, in widths of a card; y is that of its upper edge."""

    node: int
    x: float
    y: float
    width: float
    height: float


def draw_cluster(simulated: SimulatedPlan, speeds: Sequence[float]) -> tuple[Any, str]:
    """The figure, and a sentence on nodes that are left out of it."""
    from bokeh.models import ColumnDataSource, HoverTool

    boxes, zones, left_out = _lay_out(simulated)
    width = max(box.x + box.width for box in boxes) + _GAP
    low = min(box.y - box.height for box in boxes) - _GAP
    high = _find_top(simulated, zones)
    scale = min(_MOST_SCALE, _MOST_WIDTH / (width + _GAP))
    made = make_figure(
        width=int(scale * (width + _GAP)) + _TOOLBAR,
        height=int(scale * (high - low)),
        min_border=0,
        sizing_mode="fixed",
        zooms="both",
        x_range=(-_GAP, width),
        y_range=(low, high),
        name="cluster",
    )
    made.axis.visible = made.grid.visible = False
    made.toolbar_location = "right"
    _draw_zones(made, boxes, zones, simulated)
    made.quad(
        left="left",
        right="right",
        top="top",
        bottom="bottom",
        fill_color="#f5f7fa",
        line_color="#b8c0ca",
        source={
            "left": [box.x for box in boxes],
            "right": [box.x + box.width for box in boxes],
            "top": [box.y for box in boxes],
            "bottom": [box.y - box.height for box in boxes],
        },
    )
    names = [simulated.cluster.nodes[box.node].name for box in boxes]
    made.text(
        x=[box.x + 0.1 for box in boxes],
        y=[box.y - 0.12 for box in boxes],
        text=names,
        text_font_size="11px",
        text_baseline="top",
        text_color=INK,
    )
    lines = _draw_links(made, boxes, simulated)
    cards = _place_cards(simulated, boxes, speeds)
    drawn = made.rect(
        x="x",
        y="y",
        width=0.8,
        height=0.8,
        color="color",
        line_color="white",
        source=ColumnDataSource(cards, name="cluster data"),
    )
    made.text(
        x="x",
        y="y",
        text="rank",
        text_font_size=f"{max(6, min(11, int(0.3 * scale)))}px",
        text_align="center",
        text_baseline="middle",
        text_color="ink",
        source=drawn.data_source,
    )
    spare = _place_spare(simulated, boxes)
    unused = made.rect(x="x", y="y", width=0.8, height=0.8, color=OTHERS, source=spare)
    made.add_tools(
        HoverTool(tooltips=list(HOVER), renderers=[drawn]),
        HoverTool(tooltips=[("", "@device of node @node: not used by the plan")], renderers=[unused]),
        HoverTool(tooltips=_LINK_HOVER, renderers=lines),
    )
    shown = f"{count(left_out, 'more node')} without a rank or like these not drawn." if left_out else ""
    return made, shown


# -- where things are --------------------------------------------------------------------------


def _lay_out(simulated: SimulatedPlan) -> tuple[list[_Box], dict[tuple[str, str], list[_Box]], int]:
    """Nodes by zone from left to right, each zone in columns; also how many are left out."""
    used = {place.node for place in simulated.costs.places}
    nodes = [*sorted(used), *(n for n in range(len(simulated.cluster.nodes)) if n not in used)]
    left_out = max(0, len(nodes) - _MAX_NODES)
    by_zone: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for n in sorted(nodes[:_MAX_NODES]):
        node = simulated.cluster.nodes[n]
        by_zone[node.region, node.zone].append(n)
    zones: dict[tuple[str, str], list[_Box]] = {}
    x = 0.0
    for place, own in by_zone.items():
        zones[place] = []
        for first in range(0, len(own), _NODES_HIGH):
            column = own[first : first + _NODES_HIGH]
            width = max(_measure(simulated, n)[0] for n in column)
            y = 0.0
            for n in column:
                height = _measure(simulated, n)[1]
                zones[place].append(_Box(n, x, y, width, height))
                y -= height + _GAP / 2
            x += width + _GAP
        x += _GAP
    return [box for own in zones.values() for box in own], zones, left_out


def _find_top(simulated: SimulatedPlan, zones: Mapping[tuple[str, str], Sequence[_Box]]) -> float:
    """Above the zones, with room for links between them."""
    return 2.5 if len(zones) > 1 and simulated.cluster.shared_links else _GAP + 0.3


def _measure(simulated: SimulatedPlan, node: int) -> tuple[float, float]:
    """Width and height of a node."""
    number = len(simulated.cluster.nodes[node].devices)
    wide = min(number, _CARDS_WIDE)
    name = 0.17 * len(simulated.cluster.nodes[node].name)
    return max(wide, name, 2.0) + 0.3, -(-number // _CARDS_WIDE) + _LABEL + 0.15


def _find_card(box: _Box, local_rank: int) -> tuple[float, float]:
    """Middle of a card."""
    down, right = divmod(local_rank, _CARDS_WIDE)
    return box.x + 0.65 + right, box.y - _LABEL - 0.5 - down


def _place_cards(
    simulated: SimulatedPlan, boxes: Sequence[_Box], speeds: Sequence[float]
) -> dict[str, list[Any]]:
    box_of = {box.node: box for box in boxes}
    places = simulated.costs.places
    ranks = [rank for rank, place in enumerate(places) if place.node in box_of]
    middles = [_find_card(box_of[places[rank].node], places[rank].local_rank) for rank in ranks]
    columns = list_cards(simulated, ranks, speeds)
    return columns | {"x": [x for x, _ in middles], "y": [y for _, y in middles]}


def _place_spare(simulated: SimulatedPlan, boxes: Sequence[_Box]) -> dict[str, list[Any]]:
    used = {(place.node, place.local_rank) for place in simulated.costs.places}
    columns: dict[str, list[Any]] = {"x": [], "y": [], "device": [], "node": []}
    for box in boxes:
        node = simulated.cluster.nodes[box.node]
        for local_rank, device in enumerate(node.devices):
            if (box.node, local_rank) not in used:
                x, y = _find_card(box, local_rank)
                for key, value in zip(columns, (x, y, device, node.name), strict=True):
                    columns[key].append(value)
    return columns


def _draw_zones(
    made: Any,
    boxes: Sequence[_Box],
    zones: Mapping[tuple[str, str], Sequence[_Box]],
    simulated: SimulatedPlan,
) -> None:
    low = min(box.y - box.height for box in boxes) - _GAP / 3
    for (region, zone), own in zones.items():
        left = min(box.x for box in own) - _GAP / 3
        right = max(box.x + box.width for box in own) + _GAP / 3
        made.quad(left=left, right=right, top=_GAP, bottom=low, fill_color="#fbfcfd", line_color="#dfe4ea")
        name = " / ".join(filter(None, (region, zone))) or simulated.cluster.name or "cluster"
        made.text(
            x=[left + 0.1],
            y=[_GAP - 0.08],
            text=[name],
            text_font_size="12px",
            text_baseline="top",
            text_color=FAINT,
        )


# -- links -------------------------------------------------------------------------------------

_LINK_HOVER = [
    ("link", "@link"),
    ("crossed by", "@gigabytes{0,0.000} GB a step"),
    ("carries", "@rate{0,0.00} GB/s"),
    ("busy", "@share{0.0%} of the step"),
]


def list_links(simulated: SimulatedPlan) -> list[dict[str, Any]]:
    """Every link that bytes cross in a step, the fullest first."""
    network, crossed = simulated.costs.network, simulated.simulation.bytes_by_link
    capacity = dict(zip(network.names, network.capacities, strict=True))
    links = [
        {
            "link": name,
            "gigabytes": keep_digits(crossed[name] / 1e9),
            "rate": keep_digits(capacity[name] / 1e9),
            "share": keep_digits(share),
            "color": _heat(share),
        }
        for name, share in find_link_shares(simulated).items()
        if crossed[name]
    ]
    return sorted(links, key=lambda link: -link["share"])


def draw_links(simulated: SimulatedPlan) -> tuple[Any, str]:
    """Bars of the fullest links; and a sentence on those left out. None where no bytes cross any."""
    from bokeh.models import ColumnDataSource, Range1d

    links = list_links(simulated)
    shown = links[:_MAX_LINKS]
    if not shown:
        return None, "Nothing crosses a link."
    columns = {key: [link[key] for link in shown] for key in shown[0]}
    columns["y"] = [-number for number in range(len(shown))]
    made = make_figure(
        height=max(150, 80 + 18 * len(shown)),
        hover=_LINK_HOVER,
        x_range=Range1d(0, 100 * max(1e-3, 1.05 * shown[0]["share"])),
        y_range=Range1d(-len(shown) + 0.5, 0.5),
        x_axis_label="% of the step in which the link would be full",
        name="links",
    )
    columns["percent"] = [100 * share for share in columns["share"]]
    made.hbar(
        y="y",
        right="percent",
        height=0.66,
        color="color",
        source=ColumnDataSource(columns, name="links data"),
    )
    made.yaxis.ticker = columns["y"]
    made.yaxis.major_label_overrides = {-n: link["link"] for n, link in enumerate(shown)}
    made.ygrid.grid_line_color = None
    left = len(links) - len(shown)
    return made, f"{count(left, 'more link')} with less is not listed." if left == 1 else (
        f"{left} more links with less are not listed." if left else ""
    )


def _draw_links(made: Any, boxes: Sequence[_Box], simulated: SimulatedPlan) -> list[Any]:
    """Network cards as two bars above each node, links of two nodes, zones or regions as lines."""
    links = {link["link"]: link for link in list_links(simulated)}
    box_of = {simulated.cluster.nodes[box.node].name: box for box in boxes}
    drawn = []
    bars = [
        (link, box.x + box.width - offset, box.y - 0.38)
        for name, box in box_of.items()
        for way, offset in (("out", 0.78), ("in", 0.32))
        if (link := links.get(f"node {name}, {way}")) is not None
    ]
    if bars:
        columns = {key: [link[key] for link, *_ in bars] for key in bars[0][0]}
        columns |= {"x": [x for _, x, _ in bars], "y": [y for *_, y in bars]}
        drawn.append(made.rect(x="x", y="y", width=0.36, height=0.36, color="color", source=columns))
    lines = [*_join_nodes(links, box_of), *_join_zones(links, boxes, simulated)]
    if lines:
        columns = {key: [link[key] for link, *_ in lines] for key in lines[0][0]}
        columns |= {"xs": [xs for _, xs, _ in lines], "ys": [ys for *_, ys in lines]}
        columns["width"] = [2 + 6 * min(1.0, link["share"]) for link, *_ in lines]
        drawn.append(
            made.multi_line(
                xs="xs", ys="ys", line_color="color", line_width="width", line_alpha=0.75, source=columns
            )
        )
    return drawn


_Line = tuple[dict[str, Any], list[float], list[float]]


def _join_nodes(links: Mapping[str, dict[str, Any]], box_of: Mapping[str, _Box]) -> list[_Line]:
    found = []
    for first, a in box_of.items():
        for second, b in box_of.items():
            link = links.get(f"nodes {first} - {second}")
            if link is not None:
                shift = 0.08 if first < second else -0.08  # Both ways are seen.
                ys = [a.y - a.height / 2 + shift, b.y - b.height / 2 + shift]
                near, far = (a.x + a.width, b.x) if a.x < b.x else (a.x, b.x + b.width)
                xs = [near, far] if a.x != b.x else [a.x + a.width + shift, b.x + b.width + shift]
                found.append((link, xs, ys))
    return found


def _join_zones(
    links: Mapping[str, dict[str, Any]], boxes: Sequence[_Box], simulated: SimulatedPlan
) -> list[_Line]:
    """Above the zones."""
    found = []
    for word, attribute, height in (("zones", "zone", 1.35), ("regions", "region", 2.0)):
        middles: dict[str, float] = {}
        spans: defaultdict[str, list[float]] = defaultdict(list)
        for box in boxes:
            name = getattr(simulated.cluster.nodes[box.node], attribute)
            spans[name] += [box.x, box.x + box.width]
        middles = {name: (min(xs) + max(xs)) / 2 for name, xs in spans.items()}
        for first in middles:
            for second in middles:
                link = links.get(f"{word} {first} - {second}")
                if link is not None:
                    y = height + (0.12 if first < second else -0.12)
                    xs = [middles[first], middles[first], middles[second], middles[second]]
                    found.append((link, xs, [_GAP, y, y, _GAP]))
    return found


_HEAT = ("#1a7f4b", "#5a9c3f", "#9aa32c", "#d39b1a", "#dd7420", "#c2452f", "#9c1515")


def _heat(share: float) -> str:
    """From green, a link that is idle, over amber to red."""
    return _HEAT[min(len(_HEAT) - 1, int(len(_HEAT) * share))]
