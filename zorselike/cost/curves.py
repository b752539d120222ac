"""Times between and beyond measurements: curves through points.

Four ways are tried: the least-squares line of Zorse (4.3.1), the cubic spline of Poplar (offline
analysis), a monotone cubic (PCHIP) and straight pieces. Each point but the first and last is left out in
turn, and the way that predicts what was left out best is taken.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from itertools import accumulate, pairwise
from statistics import fmean, linear_regression
from typing import Literal, get_args

from zorselike.errors import ProfileError, describe_missing_package

Method = Literal["pieces", "monotone", "spline", "line"]
METHODS: tuple[Method, ...] = get_args(Method)
"""Of equally good ones the first is taken."""

MIN_POINTS_TO_CHOOSE = 4
"""With fewer, one point in the middle would decide: straight pieces."""
MIN_SPLINE_POINTS = 4

MAX_LINE_ERROR = 0.05
"""A line that misses a measured point by more, relative to it, is not taken: at the fewest rows it may well
be negative, and those are computed most."""

SLOPE_SHARE = 0.75
"""The slope beyond the largest measurement is that of a line through this share of the points, the largest
ones: two points alone have the noise of both."""

_Function = Callable[[float], float]


class CurveWarning(UserWarning):
    """Measured times fall where more is computed; they were repaired."""


@dataclass(frozen=True)
class Curve:
    """Seconds against rows (or bytes): never negative, never falling, straight outside the points."""

    method: Method
    points: tuple[tuple[float, float], ...]
    """What it goes through or, with `line`, by; repaired where measurements fell."""
    slope_above: float
    """Beyond the largest measurement."""
    _inside: _Function = field(repr=False, compare=False)

    def __call__(self, rows: float) -> float:
        first, last = self.points[0][0], self.points[-1][0]
        if rows > last:
            return self._last_s + self.slope_above * (rows - last)
        if rows < first:
            return self._below(rows)
        return self._at(rows)

    @cached_property
    def _last_s(self) -> float:
        """Where the points end."""
        return self._at(self.points[-1][0])

    def _at(self, rows: float) -> float:
        return max(0.0, self._inside(rows))

    def _below(self, rows: float) -> float:
        """The slope of the first two points, or where that would be negative at 0 the way to 0."""
        first = self.points[0][0]
        value = self._at(first)
        slope = value / first if first else 0.0
        if len(self.points) > 1:
            second = self.points[1][0]
            slope = min(slope, (self._at(second) - value) / (second - first))
        return max(0.0, value - slope * (first - rows))

    @property
    def start_s(self) -> float:
        """What nothing at all would take."""
        return self._below(0.0) if self.points[0][0] > 0 else self._at(0.0)


def fit_curve(rows: Sequence[float], seconds: Sequence[float], *, name: str = "times") -> Curve:
    """A curve through measured points, `rows` rising; one point alone is taken as proportional.

    Times that fall from one point to a later one are repaired by the lower envelope over larger batches
    (a point's value is the least measured at its rows or more), with a `CurveWarning` that says `name`.
    Raises `ProfileError` for no points, lists of different lengths, rows that do not rise, a value that is
    negative or not finite.
    """
    _check_points(rows, seconds, name)
    repaired = lower_envelope(seconds)
    if repaired != tuple(seconds):
        _warn_of_repair(rows, seconds, repaired, name)
    return _fit_points(tuple((float(x), float(y)) for x, y in zip(rows, repaired, strict=True)))


@lru_cache(maxsize=1024)
def _fit_points(points: tuple[tuple[float, float], ...]) -> Curve:
    """Remembered: a search makes the costs of hundreds of plans from one profile."""
    method = _choose(points)
    return Curve(method, points, _slope_above(points), _FITS[method](points))


def lower_envelope(seconds: Sequence[float]) -> tuple[float, ...]:
    """At each position the least of the values from there on."""
    return tuple(accumulate(reversed(seconds), min))[::-1]


def _check_points(rows: Sequence[float], seconds: Sequence[float], name: str) -> None:
    if len(rows) != len(seconds):
        raise ProfileError(f"{name}: {len(rows)} sizes with {len(seconds)} times; give one time for each")
    if not rows:
        raise ProfileError(f"{name}: no measurements; give at least one")
    if not all(math.isfinite(value) and value >= 0 for value in (*rows, *seconds)):
        raise ProfileError(f"{name}: a size or a time is negative or not finite; measure it again")
    if any(later <= earlier for earlier, later in pairwise(rows)):
        raise ProfileError(f"{name}: sizes must rise from one measurement to the next; sort them")


def _warn_of_repair(
    rows: Sequence[float], seconds: Sequence[float], repaired: Sequence[float], name: str
) -> None:
    lowered = [(x, was, now) for x, was, now in zip(rows, seconds, repaired, strict=True) if now < was]
    at, was, now = max(lowered, key=lambda point: point[1] / point[2] if point[2] else math.inf)
    warnings.warn(
        f"{name}: times fall while sizes rise at {len(lowered)} of {len(rows)} points (most at {at:g}: "
        f"{was:.4g} s, and {now:.4g} s for more); the least of each size and all larger ones is taken",
        CurveWarning,
        stacklevel=3,
    )


# -- ways to go through points -------------------------------------------------------------

_Points = Sequence[tuple[float, float]]


def _fit_pieces(points: _Points) -> _Function:
    xs, ys = [x for x, _ in points], [y for _, y in points]

    def inside(x: float) -> float:
        i = min(bisect_right(xs, x), len(xs) - 1)
        if i == 0:
            return ys[0]
        share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        return ys[i - 1] + share * (ys[i] - ys[i - 1])

    return inside


def _fit_line(points: _Points) -> _Function:
    slope, intercept = linear_regression([x for x, _ in points], [y for _, y in points])
    return lambda x: intercept + slope * x


def _fit_cubic(points: _Points, kind: Literal["PchipInterpolator", "CubicSpline"]) -> _Function:
    try:
        from scipy import interpolate
    except ModuleNotFoundError as error:
        raise ProfileError(describe_missing_package(error, "a cubic curve")) from None
    through = getattr(interpolate, kind)(*zip(*points, strict=True))
    return lambda x: float(through(x))


_FITS: dict[Method, Callable[[_Points], _Function]] = {
    "pieces": _fit_pieces,
    "monotone": partial(_fit_cubic, kind="PchipInterpolator"),
    "spline": partial(_fit_cubic, kind="CubicSpline"),
    "line": _fit_line,
}


_WITHOUT_SCIPY: tuple[Method, ...] = ("pieces", "line")
"""What a machine chooses from where nothing but torch and NumPy is installed."""


def _falls(points: _Points) -> bool:
    """Whether a cubic spline through rising points falls somewhere between them."""
    import numpy as np
    from scipy.interpolate import CubicSpline

    slope = CubicSpline(*zip(*points, strict=True)).derivative()
    turns = slope.derivative().roots(extrapolate=False)
    # Where pieces are straight, their whole extent is a root, reported as not a number.
    at = np.concatenate([[x for x, _ in points], turns[np.isfinite(turns)]])
    steepest = float(np.abs(slope(at)).max())
    return bool((slope(at) < -1e-9 * steepest).any())


def _misses(points: _Points) -> bool:
    """Whether the line by some points is too far from one of them."""
    line = _fit_line(points)
    return any(abs(line(x) - y) > MAX_LINE_ERROR * y for x, y in points)


def _choose(points: _Points) -> Method:
    """The way that predicts points left out best: of the least mean relative error."""
    if len(points) < MIN_POINTS_TO_CHOOSE:
        return "pieces"
    errors: dict[Method, float] = {}
    for method in METHODS if find_spec("scipy") else _WITHOUT_SCIPY:
        if method == "spline" and (len(points) <= MIN_SPLINE_POINTS or _falls(points)):
            continue
        if method == "line" and _misses(points):
            continue
        errors[method] = fmean(_leave_out(points, i, _FITS[method]) for i in range(1, len(points) - 1))
    return min(errors, key=lambda method: errors[method])


def _leave_out(points: _Points, position: int, fit: Callable[[_Points], _Function]) -> float:
    """The relative error at one point of a fit to the others."""
    x, y = points[position]
    found = fit([*points[:position], *points[position + 1 :]])(x)
    return abs(max(0.0, found) - y) / y if y else abs(found)


def _slope_above(points: _Points) -> float:
    if len(points) == 1:
        x, y = points[0]
        return y / x if x else 0.0
    largest = points[-max(2, math.ceil(SLOPE_SHARE * len(points))) :]
    return linear_regression([x for x, _ in largest], [y for _, y in largest]).slope
