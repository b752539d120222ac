"""Curves: never negative, never falling, straight outside, and by whichever way predicts best."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zorselike.cost.curves import CurveWarning, fit_curve, lower_envelope
from zorselike.errors import ProfileError


@st.composite
def measurements(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[float, ...]]:
    rows = draw(st.lists(st.integers(1, 200), min_size=1, max_size=9, unique=True).map(sorted))
    times = draw(
        st.lists(
            st.floats(1e-7, 1e3) | st.sampled_from([0.0, 1.0]),
            min_size=len(rows),
            max_size=len(rows),
        )
    )
    return tuple(rows), tuple(times)


def fit_quietly(rows: Sequence[float], seconds: Sequence[float]):  # type: ignore[no-untyped-def]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurveWarning)
        return fit_curve(rows, seconds)


@settings(max_examples=150)
@given(measurements())
def test_never_negative_never_falling_and_straight_outside(
    points: tuple[tuple[int, ...], tuple[float, ...]],
) -> None:
    rows, seconds = points
    curve = fit_quietly(rows, seconds)
    first, last = rows[0], rows[-1]
    inside = [first + (last - first) * i / 50 for i in range(51)]
    grid = sorted([0.0, first / 2, *inside, last + 1, last + 2, 2 * last, 10 * last])
    found = [curve(x) for x in grid]
    assert all(y >= 0 for y in found)
    scale = max(*seconds, 1e-9)
    assert all(later >= earlier - 1e-9 * scale for earlier, later in pairwise(found))
    step = curve(last + 1) - curve(last)
    assert curve(last + 7) == pytest.approx(curve(last) + 7 * step, rel=1e-6, abs=1e-9 * scale)
    assert curve(first / 2) == pytest.approx((curve(0) + curve(first)) / 2, rel=1e-6, abs=1e-9 * scale)
    assert curve.start_s == curve(0)
    # Continuous where the ways of computing it change.
    assert curve(first - 1e-9) == pytest.approx(curve(first), rel=1e-5, abs=1e-6 * scale)
    assert curve(last + 1e-9) == pytest.approx(curve(last), rel=1e-5, abs=1e-6 * scale)


@settings(max_examples=100)
@given(measurements())
def test_all_but_the_line_go_through_the_repaired_points(
    points: tuple[tuple[int, ...], tuple[float, ...]],
) -> None:
    rows, seconds = points
    curve = fit_quietly(rows, seconds)
    assert curve.points == tuple(zip(rows, lower_envelope(seconds), strict=True))
    if curve.method != "line":
        for x, y in curve.points:
            assert curve(x) == pytest.approx(y, rel=1e-9, abs=1e-9 * max(seconds))


def test_the_envelope_is_the_least_of_each_size_and_all_larger_ones() -> None:
    assert lower_envelope([3, 1, 2, 2, 5, 4]) == (1, 1, 2, 2, 4, 4)


def test_falling_times_are_repaired_with_a_warning_that_names_them() -> None:
    with pytest.warns(
        CurveWarning, match=r"forward of layer on T4: times fall .* at 1 of 4 .*most at 2: 5 s, and 3 s"
    ):
        curve = fit_curve([1, 2, 3, 4], [1, 5, 3, 4], name="forward of layer on T4")
    assert [y for _, y in curve.points] == [1, 3, 3, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_curve([1, 2, 3, 4], [1, 1, 3, 4])


def test_few_points() -> None:
    one = fit_curve([4], [2.0])
    assert (one(4), one(2), one(8), one(0)) == (2.0, 1.0, 4.0, 0.0)
    two = fit_curve([2, 4], [3.0, 4.0])
    assert (two(0), two(1), two(3), two(10)) == (2.0, 2.5, 3.5, 7.0)
    steep = fit_curve([2, 4], [1.0, 9.0])  # On a line it would be negative at 0.
    assert (steep(0), steep(1), steep(3)) == (0.0, 0.5, 5.0)


def test_the_way_is_chosen_by_what_it_predicts_of_points_left_out() -> None:
    rows = list(range(1, 17))
    noise = [(-1) ** i * 0.02 for i in rows]
    straight = fit_curve(rows, [1 + 0.5 * x + e for x, e in zip(rows, noise, strict=True)])
    assert straight.method == "line"
    smooth = fit_curve(rows, [0.1 * x**1.5 for x in rows])
    assert smooth.method == "spline"
    assert smooth(7.5) == pytest.approx(0.1 * 7.5**1.5, rel=1e-3)
    # Tiles: times go up in steps, and a spline would swing.
    steps = fit_curve([*range(1, 13)], [float(1 + (x - 1) // 4) for x in range(1, 13)])
    assert steps.method in ("pieces", "monotone")


def test_a_line_that_misses_a_measured_point_is_not_taken() -> None:
    rows = [1, 2, 3, 4, 5, 6, 7, 8]
    kinked = [3.0, 4.1, 5.9, 8.1, 9.9, 12.1, 13.9, 16.1]
    curve = fit_curve(rows, kinked)
    assert curve.method != "line"
    assert curve(1) == pytest.approx(3.0)
    kinked[0] = 2.0
    assert fit_curve(rows, kinked).method == "line"


def test_a_spline_that_falls_between_points_is_not_taken() -> None:
    rows = [1, 2, 3, 4, 5, 6]
    curve = fit_curve(rows, [1.0, 1.0, 1.0, 9.0, 9.0, 9.0])
    assert curve.method != "spline"


def test_beyond_the_range_the_slope_is_not_that_of_two_noisy_points() -> None:
    rows = list(range(1, 9))
    seconds = [float(x) for x in rows]
    seconds[-2] = 7.9
    curve = fit_curve(rows, seconds)
    assert curve(16) == pytest.approx(16, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "seconds", "message"),
    [
        ([], [], "no measurements"),
        ([1, 2], [1], "2 sizes with 1 times"),
        ([2, 1], [1, 2], "sizes must rise"),
        ([1, 1], [1, 2], "sizes must rise"),
        ([1, 2], [1, -2], "negative or not finite"),
        ([1, 2], [1, float("nan")], "negative or not finite"),
        ([-1, 2], [1, 2], "negative or not finite"),
    ],
)
def test_wrong_points_are_refused(rows: list[float], seconds: list[float], message: str) -> None:
    with pytest.raises(ProfileError, match=f"layer on T4: .*{message}"):
        fit_curve(rows, seconds, name="layer on T4")


def test_scipy_is_not_imported_until_it_is_needed() -> None:
    code = "import sys, zorselike.cost.assemble; sys.exit('scipy' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
