"""The search for the most rows, against every kind of limit that a device may have."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from zorselike.profiler.layers.row_search import MAX_GUESSES, MaxRows, TrialResult, find_max_rows

ROWS = st.integers(1, 5000)


def max_trials(most_rows: int) -> int:
    """How many trials a search takes at most."""
    return 2 * most_rows.bit_length() + MAX_GUESSES + 1


class Device:
    """Memory that is `fixed + per_row * rows`, of which a device has `limit`; remembers what was tried."""

    def __init__(self, limit: int, *, fixed: int = 100, per_row: int = 7, tells: bool = True) -> None:
        self.limit, self.fixed, self.per_row, self.tells = limit, fixed, per_row, tells
        self.tried: list[int] = []

    def __call__(self, rows: int) -> TrialResult:
        self.tried.append(rows)
        peak = self.fixed + self.per_row * rows
        if peak > self.limit:
            return TrialResult(fits=False)
        return TrialResult(fits=True, peak_bytes=peak, limit_bytes=self.limit if self.tells else 0)


@given(fits=st.integers(0, 5000), most=ROWS)
def test_any_limit_is_found(fits: int, most: int) -> None:
    tried = []

    def trial(rows: int) -> TrialResult:
        tried.append(rows)
        return TrialResult(fits=rows <= fits)

    found = find_max_rows(trial, most_rows=most)
    assert found.max_rows == min(fits, most)
    assert (found.refused_rows is not None) == (fits < most)
    assert len(tried) == len(set(tried)) <= max_trials(most)
    assert max(tried) <= most


@given(fixed=st.integers(0, 10**6), per_row=st.integers(1, 1000), room=st.integers(0, 10**6), most=ROWS)
def test_memory_that_is_told_shortens_the_search(fixed: int, per_row: int, room: int, most: int) -> None:
    plain = Device(fixed + room, fixed=fixed, per_row=per_row, tells=False)
    told = Device(fixed + room, fixed=fixed, per_row=per_row)
    expected = find_max_rows(plain, most_rows=most)
    found = find_max_rows(told, most_rows=most)
    assert found.max_rows == expected.max_rows == min(room // per_row, most)
    # One trial beyond what doubling needs proves the estimate.
    assert len(told.tried) <= max(1, found.max_rows).bit_length() + 2


@given(
    fits=st.integers(1, 3000),
    most=ROWS,
    guesses=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=30),
)
def test_lying_memory_costs_trials_and_nothing_else(
    fits: int, most: int, guesses: list[tuple[int, int]]
) -> None:
    """Whatever peaks and limits trials tell, the answer is right and the trials bounded."""
    tried: list[int] = []

    def trial(rows: int) -> TrialResult:
        tried.append(rows)
        peak, limit = guesses[len(tried) % len(guesses)]
        return TrialResult(fits=rows <= fits, peak_bytes=peak, limit_bytes=limit)

    found = find_max_rows(trial, most_rows=most)
    assert found.max_rows == min(fits, most)
    assert len(tried) == len(set(tried)) <= max_trials(most)


@given(edge=st.integers(2, 3000), width=st.integers(0, 40), seed=st.integers(0, 2**32), tells=st.booleans())
def test_an_edge_that_wavers_still_gives_rows_that_fitted(
    edge: int, width: int, seed: int, tells: bool
) -> None:
    """Near the edge the same rows may fit once and fail once (other tensors lie in the way)."""
    chance = random.Random(seed)
    fitted: set[int] = set()
    failed: set[int] = set()

    def trial(rows: int) -> TrialResult:
        fits = rows <= edge + chance.randint(-width, width)
        (fitted if fits else failed).add(rows)
        return TrialResult(
            fits=fits, peak_bytes=rows * 100 if tells and fits else 0, limit_bytes=edge * 100 + 50
        )

    found = find_max_rows(trial, most_rows=5000)
    assert found.max_rows in fitted | {0}
    assert all(rows > found.max_rows for rows in failed)
    assert found.max_rows == 0 or edge - width - 1 <= found.max_rows <= edge + width
    assert len(found.trials) <= max_trials(5000)


@given(fits=st.integers(0, 300), most=st.integers(1, 300))
def test_failed_sizes_leave_no_times(fits: int, most: int) -> None:
    found = find_max_rows(lambda rows: TrialResult(fits=rows <= fits, forward_s=rows), most_rows=most)
    assert [rows for rows, _ in found.measured] == sorted({rows for rows, r in found.trials if r.fits})
    assert all(result.fits and result.forward_s == rows for rows, result in found.measured)


def test_trials_are_few() -> None:
    assert [max_trials(most) for most in (1, 64, 4096)] == [6, 18, 30]


def test_the_order_of_trials() -> None:
    blind = Device(100 + 7 * 45, tells=False)
    assert find_max_rows(blind, most_rows=1000).max_rows == 45
    assert blind.tried == [1, 2, 4, 8, 16, 32, 64, 48, 40, 44, 46, 45]
    told = Device(100 + 7 * 45)
    assert find_max_rows(told, most_rows=1000).max_rows == 45
    assert told.tried == [1, 2, 4, 8, 16, 32, 45, 46]


def test_where_not_one_row_fits_the_search_ends_at_once() -> None:
    device = Device(50)
    assert find_max_rows(device, most_rows=64) == MaxRows(((1, TrialResult(fits=False)),))
    assert device.tried == [1]
