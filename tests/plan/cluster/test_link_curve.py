"""Rates over the size of a transfer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorselike.errors import ClusterError
from zorselike.plan.cluster.cluster import Link
from zorselike.plan.cluster.link_curve import tabulate_fit

CURVE = Link(3e9, 1e-5, ((1e6, 1e9), (4e6, 2e9), (16e6, 2.5e9)))


def test_a_link_without_points_has_its_bandwidth_at_every_size() -> None:
    link = Link(2e9, 1e-3)
    assert link.rate(1) == link.rate(1e12) == 2e9


@pytest.mark.parametrize(
    ("num_bytes", "rate"),
    [(1, 1e9), (1e6, 1e9), (2e6, 1.5e9), (4e6, 2e9), (8e6, 2.25e9), (16e6, 2.5e9), (1e12, 2.5e9)],
)
def test_points_are_joined_over_the_logarithm_of_the_size(num_bytes: float, rate: float) -> None:
    assert CURVE.rate(num_bytes) == pytest.approx(rate)


def test_no_transfer_is_faster_than_the_link() -> None:
    assert Link(1.5e9, 0, CURVE.points).rate(16e6) == 1.5e9


@given(st.floats(1, 1e12))
def test_a_rate_lies_between_its_neighbours(num_bytes: float) -> None:
    assert 1e9 <= CURVE.rate(num_bytes) <= 2.5e9


FIT = (-0.00244, 0.14086, 1.1168)
"""Of the kind that Sailor's providers have: GB/s over log2(MB)."""


@given(st.floats(1e6, 1e9))
def test_a_fit_is_tabulated_closely(num_bytes: float) -> None:
    points = tabulate_fit(FIT, max_bytes_per_s=2.42e9, smallest_bytes=1e6, largest_bytes=1e9)
    link = Link(2.42e9, 0, points)
    x = math.log2(num_bytes / 1e6)
    exact = (FIT[0] * x * x + FIT[1] * x + FIT[2]) * 1e9
    assert link.rate(num_bytes) == pytest.approx(exact, rel=1e-3)


def test_a_fit_is_held_at_its_ends_and_cut_at_its_maximum() -> None:
    points = tabulate_fit(FIT, max_bytes_per_s=2e9, smallest_bytes=1e6, largest_bytes=3e9)
    link = Link(2e9, 0, points)
    assert [size for size, _ in points][:2] == [1e6, 2e6]
    assert points[-1] == (3e9, 2e9)
    assert link.rate(1e3) == pytest.approx(1.1168e9)
    assert link.rate(1e12) == 2e9


@pytest.mark.parametrize(
    ("coefficients", "smallest", "largest", "told"),
    [
        (FIT, 1e9, 1e6, "give the smallest size that was fitted and then the largest"),
        (FIT, 0, 1e6, "has no range"),
        ((-1, 0, 1), 1e6, 1e9, "narrow its range to the sizes that were fitted"),
        ((float("nan"), 0, 1), 1e6, 1e9, "narrow its range to the sizes that were fitted"),
    ],
)
def test_a_fit_that_cannot_be_is_refused(
    coefficients: tuple[float, ...], smallest: float, largest: float, told: str
) -> None:
    with pytest.raises(ClusterError, match=told):
        tabulate_fit(coefficients, max_bytes_per_s=3e9, smallest_bytes=smallest, largest_bytes=largest)
