"""What actions cost the host, from the times of steps; and computation beside collectives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorselike.profiler.clock import make_rising, trimmed_mean
from zorselike.profiler.machine import overlap_timing
from zorselike.profiler.machine.overlap_timing import MOST, NUM_GATHERS, find_slowdown
from zorselike.profiler.program.action_costs import (
    FEW_UNITS,
    MANY_UNITS,
    ActionCosts,
    ActionSamples,
    ActionTime,
    draw_lines,
    find_shared,
)
from zorselike.schedule.actions import Kind, parse_action

SECONDS = st.floats(1e-6, 1e-1)


def step(*entries: tuple[str, float], wall: float = 0.0) -> list[ActionTime]:
    """Actions and the thread's seconds of each; all took `wall` more by the clock."""
    return [ActionTime(parse_action(text), 0.0, cpu_s + wall, cpu_s) for text, cpu_s in entries]


ONE_STEP = (("0UNSHARD", 1.0), ("0F0", 5.0), ("0F1", 3.0), ("0F2", 3.0), ("0RESHARD", 0.5))
BACKWARDS = (
    ("0UNSHARD", 1.5),
    ("0B2", 8.0),
    ("0B1", 6.0),
    ("0B0", 6.0),
    ("0REDUCE_GRAD", 4.0),
    ("NORM", 2.0),
)


def test_what_the_first_computation_takes_longer_is_its_gathers() -> None:
    samples = ActionSamples(is_cpu=True)
    samples.add_step(step(*ONE_STEP, *BACKWARDS, wall=9.0))
    assert dict(samples.seconds) == {
        Kind.UNSHARD: [1.0 + 2.0, 1.5 + 2.0],
        Kind.F: [3.0] * 3,
        Kind.B: [6.0] * 3,
        Kind.RESHARD: [0.5],
        Kind.REDUCE_GRAD: [4.0],
        Kind.NORM: [2.0],
    }


def test_with_a_device_calls_count_until_they_return_and_waiting_for_it_does_not() -> None:
    samples = ActionSamples(is_cpu=False)
    samples.add_step(step(*BACKWARDS[1:], wall=1.0))
    assert dict(samples.seconds) == {Kind.B: [9.0, 7.0, 7.0], Kind.REDUCE_GRAD: [5.0]}


def test_without_gathers_every_computation_counts_as_it_was() -> None:
    """ZeRO 3 gathers inside, and one microbatch alone tells nothing of a gather."""
    samples = ActionSamples(is_cpu=True)
    samples.add_step(step(("0F0", 5.0), ("0F1", 3.0), ("1UNSHARD", 1.0), ("1F0", 7.0)))
    assert dict(samples.seconds) == {Kind.F: [5.0, 3.0, 7.0], Kind.UNSHARD: [1.0]}


@given(st.dictionaries(st.sampled_from(list(Kind)), st.tuples(SECONDS, SECONDS), min_size=1))
def test_lines_go_through_both_runs(costs: dict[Kind, tuple[float, float]]) -> None:
    few, many = (
        {kind: base + count * unit for kind, (base, unit) in costs.items()}
        for count in (FEW_UNITS, MANY_UNITS)
    )
    found = draw_lines(few, many)
    for kind, (base, unit) in costs.items():
        assert found.action_s[kind] == pytest.approx(base, abs=1e-9)
        assert found.unit_s[kind] == pytest.approx(unit, abs=1e-9)


def test_noise_makes_nothing_negative() -> None:
    found = draw_lines({Kind.F: 2.0, Kind.B: 1.0}, {Kind.F: 1.0, Kind.B: 9.0, Kind.STEP: 1.0})
    assert found == ActionCosts({"B": 0.0, "F": 2.0}, {"B": 4.0, "F": 0.0})


def test_what_sharing_costs() -> None:
    own = ActionCosts({}, {"UNSHARD": 1.0, "RESHARD": 2.0, "REDUCE_GRAD": 3.0, "F": 9.0, "B": 9.0})
    zero2 = ActionCosts({}, {"UNSHARD": 4.0, "RESHARD": 1.0, "REDUCE_GRAD": 8.0, "F": 9.0, "B": 9.5})
    zero3 = ActionCosts({}, {"F": 11.0, "B": 15.0})
    assert find_shared(own, zero2, zero3) == {"UNSHARD": 3.0, "REDUCE_GRAD": 5.0, "F": 2.0, "B": 5.5}


@given(st.lists(SECONDS, min_size=1), st.floats(1, 1e6))
def test_a_mean_without_the_largest(seconds: list[float], much: float) -> None:
    least = min(seconds)
    assert trimmed_mean([least, least * 1e6]) == least
    assert least * (1 - 1e-9) <= trimmed_mean(seconds) <= max(seconds) * (1 + 1e-9)
    assert trimmed_mean([*[least] * 39, much]) == pytest.approx(least)


@given(st.lists(SECONDS, min_size=1))
def test_noise_is_taken_out_of_times_that_rise(seconds: list[float]) -> None:
    rising = make_rising(seconds)
    assert list(rising) == sorted(rising) and len(rising) == len(seconds)
    assert sum(rising) == pytest.approx(sum(seconds))
    assert make_rising(sorted(seconds)) == pytest.approx(tuple(sorted(seconds)))


@given(SECONDS, st.floats(1, 50), st.floats(1, 4))
def test_the_slowdown_with_which_both_would_take_as_long(gather_s: float, factor: float, more: float) -> None:
    gathers_s = NUM_GATHERS * gather_s
    beside_s = gathers_s - gather_s
    computing_s = more * gathers_s
    both_s = gathers_s + computing_s - beside_s / factor
    assert find_slowdown(gathers_s, computing_s, both_s) == pytest.approx(factor, rel=1e-6)


def test_a_slowdown_stays_a_factor() -> None:
    assert find_slowdown(1.0, 1.0, 2.0) == find_slowdown(1.0, 1.0, 3.0) == MOST
    assert find_slowdown(1.0, 1.0, 0.5) == 1.0


def test_one_disturbed_trial_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of gathers, of computations and of both, three times; in the second something else ran."""
    seconds = iter([0.8, *(0.8, 0.8, 1.0), *(0.8, 0.8, 1.7), *(0.8, 0.8, 1.1)])

    class Bench(SimpleNamespace):
        gather = compute = gather_and_compute = None

        def __init__(self, *_: object) -> None:
            super().__init__(fit=lambda _: None, time=lambda *_: next(seconds))

    monkeypatch.setattr(overlap_timing, "_Bench", Bench)
    found = overlap_timing.measure_slowdown(None, None, num_bytes=1, repeats=1)  # type: ignore[arg-type]
    assert found == pytest.approx(find_slowdown(0.8, 0.8, 1.1)) and next(seconds, None) is None
