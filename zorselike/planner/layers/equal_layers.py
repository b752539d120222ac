"""Equal layers to ministages of several groups: one at a time to whoever is best off with it."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Run:
    """Consecutive layers of one kind."""

    num_layers: int
    seconds: tuple[float, ...]
    """Time of one of them, in each group."""
    num_bytes: tuple[float, ...]


class Piece(NamedTuple):
    """A ministage that gets some of a run."""

    ministage: int
    group: int
    open_s: float
    """What it has besides."""
    least: int
    """Layers of the run."""


def slowest_load(run: Run, pieces: Sequence[Piece], loads: Sequence[float], room: Sequence[int]) -> float:
    """The least seconds of the slowest group once the run is shared out; infinite where it does not fit.

    Which of its ministages gets a layer does not matter to a group, so each layer goes to the group that is
    fastest with it; the largest load that this leads to is the least possible, since any other way leaves
    some group with as many layers or more.

    Args:
        loads: seconds of each group without the run.
        room: layers of the run that each group has room for.
    """
    given: defaultdict[int, int] = defaultdict(int)
    for piece in pieces:
        given[piece.group] += piece.least
    left = run.num_layers - sum(given.values())
    if left < 0 or min(room) < 0 or any(number > room[g] for g, number in given.items()):
        return math.inf
    heap = [(loads[g] + (number + 1) * run.seconds[g], g) for g, number in given.items() if number < room[g]]
    heapq.heapify(heap)
    for _ in range(left):
        if not heap:
            return math.inf
        _, g = heapq.heappop(heap)
        given[g] += 1
        if given[g] < room[g]:
            heapq.heappush(heap, (loads[g] + (given[g] + 1) * run.seconds[g], g))
    return max(load + given[g] * run.seconds[g] for g, load in enumerate(loads))


def share_evenly(
    run: Run, pieces: Sequence[Piece], loads: Sequence[float], room: Sequence[int], limit_s: float
) -> list[int]:
    """Layers of each piece, so that no group takes longer than `limit_s` (some way to do so exists) and the
    squares of the ministages' seconds add up to least.

    Each layer goes where the sum grows least. With limits on pieces and on groups of pieces only, and a sum
    of convex terms, that is exact (Federgruen and Groenevelt, "The greedy procedure for resource
    allocation problems", 1986).
    """
    given = [piece.least for piece in pieces]
    left_of_group = {
        g: min(room[g], _within(limit_s - loads[g], run.seconds[g], run.num_layers))
        for g in {piece.group for piece in pieces}
    }
    for piece in pieces:
        left_of_group[piece.group] -= piece.least

    def growth(position: int) -> tuple[float, int]:
        piece = pieces[position]
        each = run.seconds[piece.group]
        now = piece.open_s + given[position] * each
        return each * (2 * now + each), position

    heap = [growth(position) for position in range(len(pieces))]
    heapq.heapify(heap)
    left = run.num_layers - sum(given)
    while left:
        _, position = heapq.heappop(heap)
        piece = pieces[position]
        if left_of_group[piece.group] > 0:
            given[position] += 1
            left_of_group[piece.group] -= 1
            left -= 1
            heapq.heappush(heap, growth(position))
    return given


def _within(room_s: float, each_s: float, most: int) -> int:
    """How many layers take no longer than `room_s`."""
    return most if each_s * most <= room_s else int(room_s / each_s)
