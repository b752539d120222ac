"""What of a simulated step is drawn: which ranks, and which of their actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from zorselike.simulator.report.picture import BARS
from zorselike.simulator.result import Span, Track
from zorselike.simulator.simulated_plan import SimulatedPlan

MAX_RANKS = 64
"""Up to how many ranks each has its line."""
MAX_BARS = 24_000
"""Bars of a timeline that a browser draws at once."""
PIXELS = 1_600
"""Columns of a timeline that a screen has, all of it in view."""
MAX_POINTS = 1_200
"""Of a curve of memory."""


@dataclass(frozen=True)
class ShownRank:
    """A line of the page."""

    rank: int
    label: str


@dataclass(frozen=True)
class Bar:
    """An action, or several too short to be seen one by one, on one track of a rank."""

    rank: int
    track: Track
    start_s: float
    stop_s: float
    span: Span
    """The first of them."""
    number: int = 1


def choose_ranks(simulated: SimulatedPlan, most: int = MAX_RANKS) -> tuple[ShownRank, ...]:
    """All ranks, group by group; of more than `most` the busiest of each group and type of device."""
    plan, types, times = simulated.plan, simulated.device_types, simulated.simulation.ranks
    ranks = [rank for group in plan.groups for rank in group.flat_ranks]
    if len(ranks) <= most:
        return tuple(ShownRank(rank, f"{rank}  {types[rank]}") for rank in ranks)
    alike: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for rank in ranks:
        alike[plan.group_of_rank[rank], types[rank]].append(rank)
    shown = []
    for (group, device), own in alike.items():
        busiest = max(own, key=lambda rank: times[rank].busy_s)
        label = f"{busiest}  {device}, busiest of {len(own)} in group {group}"
        shown.append(ShownRank(busiest, label))
    return tuple(shown[:most])


def list_bars(
    simulated: SimulatedPlan, shown: Sequence[ShownRank], most: int = MAX_BARS
) -> tuple[list[Bar], float]:
    """The actions of these ranks, whose spans were recorded, inside one step; and the seconds below which
    neighbours on a track were joined, 0 if all are there."""
    wanted = {each.rank for each in shown}
    by_track: defaultdict[tuple[int, Track], list[Bar]] = defaultdict(list)
    for span in simulated.simulation.folded_spans():
        if span.rank in wanted and span.track in BARS:
            by_track[span.rank, span.track].append(
                Bar(span.rank, span.track, span.start_s, span.stop_s, span)
            )
    for bars in by_track.values():
        bars.sort(key=lambda bar: (bar.start_s, bar.stop_s))
    if sum(map(len, by_track.values())) <= most:
        return _flatten(by_track), 0.0
    pixel_s = simulated.simulation.iteration_s / PIXELS
    while True:
        joined = {key: _join(bars, pixel_s) for key, bars in by_track.items()}
        if sum(map(len, joined.values())) <= most:
            return _flatten(joined), pixel_s
        pixel_s *= 2


def _flatten(by_track: Mapping[tuple[int, Track], Iterable[Bar]]) -> list[Bar]:
    return [bar for bars in by_track.values() for bar in bars]


def _join(bars: Iterable[Bar], pixel_s: float) -> list[Bar]:
    """Neighbours of one kind and ministage that are shorter than a pixel, and less than one apart, as one."""
    joined: list[Bar] = []
    for bar in bars:
        last = joined[-1] if joined else None
        if (
            last is not None
            and bar.stop_s - bar.start_s < pixel_s
            and bar.start_s - last.stop_s < pixel_s
            and (last.number > 1 or last.stop_s - last.start_s < pixel_s)
            and bar.stop_s - last.start_s < 2 * pixel_s
        ):
            joined[-1] = replace(last, stop_s=max(last.stop_s, bar.stop_s), number=last.number + bar.number)
        else:
            joined.append(bar)
    return joined


def follow_memory(
    simulated: SimulatedPlan, rank: int, most: int = MAX_POINTS
) -> tuple[list[float], list[int]]:
    """Seconds and bytes of a rank's device inside one step, as steps to be drawn; of more than `most` points
    the largest of each interval, so that no peak is lost.
    Nothing of a rank that does nothing."""
    iteration_s = simulated.simulation.iteration_s
    points = [(start % iteration_s, size) for start, size in simulated.simulation.memory_over_time(rank)]
    points.sort(key=lambda point: point[0])
    if len(points) > most:
        highest: dict[int, tuple[float, int]] = {}
        for start_s, size in points:
            column = int(start_s / iteration_s * most)
            if column not in highest or size > highest[column][1]:
                highest[column] = (start_s, size)
        points = list(highest.values())
    if not points:
        return [], []
    # What is held at the end of a step is held when the next begins.
    points = [(0.0, points[-1][1]), *points, (iteration_s, points[-1][1])]
    return [start_s for start_s, _ in points], [size for _, size in points]
