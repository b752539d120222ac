"""Which small changes are simulated first."""

from __future__ import annotations

from math import inf

from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan
from zorselike.planner.candidate.choice import Choice
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.search.evaluator import EstimatedCandidate
from zorselike.planner.search.found import FoundCandidates
from zorselike.planner.search.local_search import _Waiting
from zorselike.planner.search.score import Score


def estimate(seconds: float, *, zero: int = 1, rows: int = 1) -> EstimatedCandidate:
    candidate = CandidatePlan((CandidateGroup((0,), Mode(zero=zero), ((rows,),)),), (0,), (1,))
    return EstimatedCandidate(Choice((), 1), candidate, Score(0.0, seconds, 0.0), "by hand")


def take(waiting: _Waiting, limit: float = inf) -> list[float]:
    return [estimated.score.wanted for _, estimated in waiting.take(limit)]


def test_the_best_estimates_come_first_up_to_a_limit():
    waiting = _Waiting({})
    for way, seconds in (("rows", 3.0), ("layers", 2.0), ("rows", 1.0), ("layers", 9.0)):
        waiting.add(way, estimate(seconds))
    assert [estimated.score.wanted for estimated in waiting.list_next(2)] == [1.0, 2.0]
    assert take(waiting, limit=5.0) == [1.0, 2.0, 3.0]
    waiting.add("rows", estimate(4.0))
    assert take(waiting) == [4.0, 9.0]


def test_ways_that_come_out_worse_than_their_estimates_wait():
    errors: dict = {}
    waiting = _Waiting(errors)
    for _ in range(3):
        waiting.learn("rows", 1.3)  # With the first guess 1.0, a mean of 1.225.
    for way, seconds in (("rows", 1.0), ("choice", 1.2), ("choice", 1.25)):
        waiting.add(way, estimate(seconds))
    assert take(waiting) == [1.2, 1.0, 1.25]
    assert take(_Waiting(errors)) == []


def test_what_differs_in_modes_alone_with_the_same_estimate_waits():
    found = FoundCandidates(["T4"])
    for seconds, zero, rows in ((2.0, 0, 1), (2.0, 1, 1), (2.0, 2, 1), (2.05, 1, 2), (1.99, 3, 1)):
        found.keep(estimate(seconds, zero=zero, rows=rows))
    order = []
    while (best := found.peek()) is not None:
        order.append((best.score.wanted, best.candidate.groups[0].mode.zero))
        found.take(best)
    assert order == [(1.99, 3), (2.0, 0), (2.05, 1), (2.0, 1), (2.0, 2)]


def test_what_takes_little_time_is_simulated_before_all_else_if_it_is_nearly_as_good():
    found = FoundCandidates(["T4"])
    estimates = [estimate(seconds, rows=rows) for seconds, rows in ((1.0, 1), (1.2, 2), (1.25, 3), (1.6, 4))]
    for estimated in estimates:
        found.keep(estimated)
    nominal_s = dict(zip((own.candidate for own in estimates), (16.0, 2.0, 1.9, 0.1), strict=True))
    first = found.peek_first(nominal_s.__getitem__)
    assert first is estimates[1]  # 16 s is four doublings, 1.9 s hardly less than 2 s.
    found.take(first)
    assert found.peek_first(lambda _: 0.5) is found.peek() is estimates[0]
    order = []
    while (best := found.peek()) is not None:
        order.append(best.score.wanted)
        found.take(best)
    assert order == [1.0, 1.25, 1.6]
