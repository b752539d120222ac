"""Whose turn it is."""

from __future__ import annotations

import pytest

from zorselike.planner.search.turns import Turns


class Pieces:
    """So many pieces of work that take as long as they are said to."""

    def __init__(self, name: str, number: int, nominal_s: float, log: list[str]) -> None:
        self._name, self._left, self._nominal_s, self._log = name, number, nominal_s, log

    def peek(self) -> float | None:
        return self._nominal_s if self._left else None

    def advance(self) -> float:
        self._left -= 1
        self._log.append(self._name)
        return self._nominal_s

    def add(self, number: int) -> None:
        self._left += number


def test_shares_are_of_what_is_done():
    log: list[str] = []
    turns = Turns([(Pieces("a", 10_000, 0.1, log), 0.25), (Pieces("b", 10_000, 0.5, log), 0.75)])
    for _ in range(800):
        turns.advance()
    assert 0.5 * log.count("b") / (0.1 * log.count("a")) == pytest.approx(3, rel=0.02)


def test_a_long_piece_waits_until_others_have_done_their_part():
    log: list[str] = []
    turns = Turns([(Pieces("long", 2, 1.0, log), 0.5), (Pieces("short", 1000, 0.1, log), 0.5)])
    for _ in range(30):
        turns.advance()
    assert 8 <= log.index("long") <= 11
    assert log.count("long") == 2


def test_what_had_nothing_to_do_does_not_catch_up():
    log: list[str] = []
    idle = Pieces("idle", 0, 0.1, log)
    turns = Turns([(idle, 0.5), (Pieces("busy", 1000, 0.1, log), 0.5)])
    for _ in range(100):
        turns.advance()
    idle.add(1000)
    for _ in range(20):
        turns.advance()
    assert 9 <= log.count("idle") <= 11


def test_it_ends_when_nothing_is_left_to_do():
    log: list[str] = []
    Turns([(Pieces("a", 3, 0.1, log), 0.5), (Pieces("b", 2, 9.0, log), 0.5)]).run()
    assert sorted(log) == ["a"] * 3 + ["b"] * 2
