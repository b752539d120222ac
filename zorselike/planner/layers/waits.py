"""How long groups wait for each other with layers cut one way or another.

`split_layers.py` looks at the slowest group alone. But groups compute their ministages side by side, and
where those of one round take unlike times, one waits for the other in each: beside a head that takes as long
as four layers the next group's last ministage wants four of them, and not two in each of its ministages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

WORTH_MOVING = 1e-3
"""Share of a step that moving a layer has to save."""
MOST_ROUNDS = 4
"""Of many ministages, layers move up to so many rounds further or back."""
_FEW_EDGES = 24
"""Of fewer boundaries of ministages, layers move across any number of them at once."""


@dataclass(frozen=True)
class GroupTimes:
    """A group's time for each layer, all of its microbatches, in seconds."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    num_microbatches: int
    """Of its busiest device."""


class Waits:
    """About how long steps take in which all is forward first and the microbatches of the last ministage go
    back at once. Links, collectives and copies take no time here; nor does memory count."""

    def __init__(self, owners: tuple[int, ...], groups: Sequence[GroupTimes]) -> None:
        """`owners`: the group of each ministage, in turn."""
        self._owners = owners
        self._forward_s = _add_up([group.forward_s for group in groups])
        self._backward_s = _add_up([group.backward_s for group in groups])
        self._counts = [group.num_microbatches for group in groups]
        self._moves = _list_moves(len(owners), len(groups))

    def shorten(self, ends: tuple[int, ...]) -> tuple[int, ...]:
        """Where ministages end in the best that moves of single layers lead to."""
        while better := self.list_better(ends):
            ends = better[0]
        return ends

    def list_better(self, ends: tuple[int, ...]) -> list[tuple[int, ...]]:
        """What the move of one layer leads to and takes less time, the least first."""
        changed = np.array(ends) + self._moves
        starts = np.hstack([np.zeros((len(changed), 1), dtype=np.int64), changed[:, :-1]])
        changed = changed[(changed > starts).all(axis=1)]
        seconds = self._find_steps_s(changed)
        better = np.flatnonzero(seconds < (1 - WORTH_MOVING) * self.find_step_s(ends))
        best_first = better[seconds[better].argsort(kind="stable")]
        return [tuple(map(int, changed[i])) for i in best_first]

    def find_step_s(self, ends: Sequence[int]) -> float:
        """Seconds of a step."""
        return float(self._find_steps_s(np.array([ends]))[0])

    def _find_steps_s(self, ends: Indices) -> Floats:
        """The same of several ways to cut the layers at once, a row each. Of each ministage's microbatches
        the first and the last are followed."""
        owners, last = self._owners, len(self._owners) - 1
        bounds = np.hstack([np.zeros((len(ends), 1), dtype=np.int64), ends])

        def sum_up(layers_s: Floats, i: int) -> Floats:
            its_s: Floats = layers_s[owners[i]]
            return its_s[bounds[:, i + 1]] - its_s[bounds[:, i]]

        phases = [(i, sum_up(self._forward_s, i)) for i in range(last)]
        phases += [(last, sum_up(self._forward_s, last) + sum_up(self._backward_s, last))]
        phases += [(i, sum_up(self._backward_s, i)) for i in range(last - 1, -1, -1)]
        busy = np.zeros((len(self._counts), len(ends)))
        first = done = np.zeros(len(ends))
        before = self._counts[owners[0]]
        for i, seconds in phases:
            g, number = owners[i], self._counts[owners[i]]
            each_s = seconds / number
            if number < before:  # Its first has rows of several that were sent.
                first = first + (before - number) / (number * (before - 1)) * (done - first)
            first = np.maximum(busy[g], first) + each_s
            busy[g] = done = np.maximum(first + seconds - each_s, done + each_s)
            before = number
        step_s: Floats = busy.max(axis=0)
        return step_s


def list_lengths(num_edges: int, num_groups: int, *, few: int) -> Sequence[int]:
    """Across how many of so many boundaries of ministages layers move at once: of fewer than `few` any
    number; else one, or as many as lead from one ministage of a group to its next ones."""
    if num_edges < few:
        return range(1, num_edges + 1)
    rounds = [number * num_groups for number in range(1, MOST_ROUNDS + 1) if num_groups > 1]
    return [1, *(length for length in rounds if length <= num_edges)]


def _add_up(layers_s: Sequence[Sequence[float]]) -> Floats:
    """By group: of all layers before each, and of all."""
    return np.array([np.concatenate([[0.0], np.cumsum(own)]) for own in layers_s])


@cache
def _list_moves(num_ministages: int, num_groups: int) -> Indices:
    """What is added to the ends of ministages where a layer goes to the next one, or over several that stay
    as large as they are, either way; a row each."""
    num_edges = num_ministages - 1
    moves = np.zeros((0, num_ministages), dtype=np.int64)
    for length in list_lengths(num_edges, num_groups, few=_FEW_EDGES):
        own = np.zeros((num_edges - length + 1, num_ministages), dtype=np.int64)
        for first, row in enumerate(own):
            row[first : first + length] = 1
        moves = np.vstack([moves, own, -own])
    return moves
