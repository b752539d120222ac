"""Cubic curves through points: monotone ones (PCHIP) and splines, those of SciPy without it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

Points = Sequence[tuple[float, float]]


class _Piece(NamedTuple):
    """`start + slope u + square u^2 + cube u^3`, with `u` from 0 to `width`."""

    width: float
    start: float
    slope: float
    square: float
    cube: float

    def at(self, u: float) -> float:
        return self.start + u * (self.slope + u * (self.square + u * self.cube))

    def slope_at(self, u: float) -> float:
        return self.slope + u * (2 * self.square + u * 3 * self.cube)


@dataclass(frozen=True)
class Cubic:
    """Cubic pieces through points, x rising, with one slope at each."""

    points: Points
    slopes: Sequence[float]

    def __call__(self, x: float) -> float:
        pieces = len(self.points) - 1
        i = min(max(bisect_right(self.points, x, key=lambda point: point[0]), 1), pieces) - 1
        return self._piece(i).at(x - self.points[i][0])

    @property
    def falls(self) -> bool:
        """Whether it falls anywhere between its points."""
        slopes = [*self.slopes, *self._extreme_slopes()]
        return min(slopes) < -1e-9 * max(map(abs, slopes))

    def _extreme_slopes(self) -> Iterator[float]:
        for i in range(len(self.points) - 1):
            piece = self._piece(i)
            turn = -piece.square / (3 * piece.cube) if piece.cube else 0.0
            if 0 < turn < piece.width:
                yield piece.slope_at(turn)

    def _piece(self, i: int) -> _Piece:
        (x, y), (next_x, next_y) = self.points[i : i + 2]
        width, begin, end = next_x - x, self.slopes[i], self.slopes[i + 1]
        mean = (next_y - y) / width
        bend = (begin + end - 2 * mean) / width
        return _Piece(width, y, begin, (mean - begin) / width - bend, bend / width)


def _chords(points: Points) -> tuple[list[float], list[float]]:
    """Widths and slopes of the straight pieces."""
    widths = [next_x - x for (x, _), (next_x, _) in pairwise(points)]
    return widths, [(b[1] - a[1]) / width for (a, b), width in zip(pairwise(points), widths, strict=True)]


def fit_monotone(points: Points) -> Cubic:
    """Rises where the points rise (Fritsch and Butland 1984): each slope is a weighted harmonic mean of
    those beside it. Three points at least."""
    widths, chords = _chords(points)
    inner = []
    for (before, after), (left, right) in zip(pairwise(widths), pairwise(chords), strict=True):
        weights = 2 * after + before, after + 2 * before
        rises = left * right > 0
        inner.append(sum(weights) / (weights[0] / left + weights[1] / right) if rises else 0.0)
    first, last = _end_slope(widths, chords), _end_slope(widths[::-1], chords[::-1])
    return Cubic(points, [first, *inner, last])


def _end_slope(widths: Sequence[float], chords: Sequence[float]) -> float:
    """That of a parabola through three points, kept from turning back."""
    slope = ((2 * widths[0] + widths[1]) * chords[0] - widths[0] * chords[1]) / (widths[0] + widths[1])
    if slope * chords[0] <= 0:
        return 0.0
    turns = chords[0] * chords[1] <= 0
    return 3 * chords[0] if turns and abs(slope) > 3 * abs(chords[0]) else slope


def fit_spline(points: Points) -> Cubic:
    """With a continuous second derivative, and a third one that is continuous at the second point and
    the last but one ("not a knot"). Four points at least."""
    h, s = _chords(points)
    # Rows (lower, diagonal, upper, right side) of a tridiagonal system of the slopes.
    rows = [(0.0, *_end_row(h, s))]
    for (before, after), (left, right) in zip(pairwise(h), pairwise(s), strict=True):
        rows.append((after, 2 * (before + after), before, 3 * (after * left + before * right)))
    diagonal, lower, right_side = _end_row(h[::-1], s[::-1])
    rows.append((lower, diagonal, 0.0, right_side))
    solved: list[tuple[float, float]] = []
    for lower, diagonal, upper, right_side in rows:
        above, value = solved[-1] if solved else (0.0, 0.0)
        pivot = diagonal - lower * above
        solved.append((upper / pivot, (right_side - lower * value) / pivot))
    slopes = [0.0]
    for above, value in reversed(solved):
        slopes.append(value - above * slopes[-1])
    return Cubic(points, slopes[:0:-1])


def _end_row(h: Sequence[float], s: Sequence[float]) -> tuple[float, float, float]:
    """Of the first point: its own factor, that of the next, and the right side."""
    both = h[0] + h[1]
    return h[1], both, ((h[0] + 2 * both) * h[1] * s[0] + h[0] ** 2 * s[1]) / both
