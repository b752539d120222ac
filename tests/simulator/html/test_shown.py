"""What of a step is drawn: ranks by group, and no action, second or peak that gets lost on the way."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from handmade import GIB, SPANS, make_case, make_simulation, make_spans
from hypothesis import given
from hypothesis import strategies as st

from zorselike.simulator.html.shown import choose_ranks, follow_memory, list_bars
from zorselike.simulator.result import Track

PIECES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["compute", "send"]),
        st.integers(1, 40),
        st.integers(0, 30),
        st.sampled_from(["0F0", "0B0"]),
    ),
    min_size=1,
    max_size=80,
)
"""Rank, track, thousandths of the step that it takes and that are free before, action."""


def test_every_rank_has_a_line_or_the_busiest_of_its_kind() -> None:
    case = make_case()
    assert [each.rank for each in choose_ranks(case)] == [0, 1, 2]
    times = list(case.simulation.ranks)
    times[2] = replace(times[2], busy_s=5.0)
    busier = replace(case, simulation=replace(case.simulation, ranks=tuple(times)))
    few = choose_ranks(busier, most=2)
    assert [each.rank for each in few] == [0, 2]
    assert few[1].label == "2  T4, busiest of 2 in group 1"


def test_all_actions_are_bars_while_they_are_few() -> None:
    case = make_case()
    bars, pixel_s = list_bars(case, choose_ranks(case))
    assert pixel_s == 0 and all(bar.number == 1 for bar in bars)
    found = sorted((bar.rank, bar.track, bar.start_s, bar.stop_s, bar.span.action.text) for bar in bars)
    assert found == sorted(SPANS)


@given(pieces=PIECES, most=st.integers(8, 60))
def test_joined_bars_have_every_action_once_and_hide_no_gap_of_a_pixel(
    pieces: list[tuple[int, Track, int, int, str]], most: int
) -> None:
    clocks: defaultdict[tuple[int, str], float] = defaultdict(float)
    rows = []
    for rank, track, takes, free, action in pieces:
        start = clocks[rank, track] + free / 100
        clocks[rank, track] = start + takes / 100
        if clocks[rank, track] <= 10:
            rows.append((rank, track, start, clocks[rank, track], action))
    case = make_case(make_simulation(spans=make_spans(rows)))
    shown = choose_ranks(case)
    bars, pixel_s = list_bars(case, shown, most)
    assert len(bars) <= max(most, len(rows) if not pixel_s else 0)
    assert sum(bar.number for bar in bars) == len(rows)
    for rank, track, start, stop, action in rows:
        own = [bar for bar in bars if (bar.rank, bar.track) == (rank, track)]
        (cover,) = [bar for bar in own if bar.start_s <= start + 1e-9 and stop <= bar.stop_s + 1e-9]
        if stop - start >= pixel_s:
            assert cover.number == 1 and cover.span.action.text == action
        else:
            assert cover.stop_s - cover.start_s < max(2 * pixel_s, stop - start + 1e-9)


@pytest.mark.parametrize("most", [100, 3, 1])
def test_memory_keeps_its_peak_and_begins_as_it_ends(most: int) -> None:
    case = make_case()
    for rank in range(3):
        seconds, sizes = follow_memory(case, rank, most)
        assert max(sizes) == case.peak_bytes[rank] == (10 * GIB, 8 * GIB, 8 * GIB)[rank]
        assert (seconds[0], seconds[-1]) == (0, 10) and seconds == sorted(seconds)
        assert (sizes[0] == sizes[-1] and len(seconds) <= most + 2) or most >= 100
