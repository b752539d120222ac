"""What a member that says nothing is taken for: one that is gone, or one in a long call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from unittest import mock

import pytest

from zorselike.elastic.contract import Member
from zorselike.elastic.meeting import links, make_member
from zorselike.elastic.meeting.environment import listen
from zorselike.elastic.meeting.links import Links
from zorselike.elastic.membership import events as e

SILENCE_S = 0.5
LIMIT_S = 30.0


@contextmanager
def make(told: list[Any]) -> Iterator[tuple[Links, Member]]:
    listener = listen("127.0.0.1", 0)
    me = make_member("127.0.0.1", listener.getsockname()[1], "here", 0, "cpu", 0)
    own = Links(me, "token", listener, silence_s=SILENCE_S, tell=told.append, ask=lambda asked: asked)
    with closing(mock.Mock(close=own.close_all)):
        yield own, me


def poll(each: list[Links], until: Callable[[], bool], *, limit_s: float = LIMIT_S) -> bool:
    """Whether that comes true in time."""
    end_s = time.monotonic() + limit_s
    while not until() and time.monotonic() < end_s:
        for own in each:
            own.poll(0.01)
    return until()


@pytest.mark.parametrize(
    ("known", "is_silent"),
    [
        ({}, False),
        ({"is_stopped": lambda process: True}, True),
        ({"find_process": lambda name: None}, False),
        ({"HELD_S": 2 * SILENCE_S}, True),
    ],
    ids=["it runs here", "it is stopped", "its node answers", "it runs for too long"],
)
def test_a_quiet_member_is_silent_where_kernels_do_not_know_better(
    known: dict[str, Any], is_silent: bool
) -> None:
    told: list[Any] = []
    with ExitStack() as stack:
        for name, value in known.items():
            stack.enter_context(mock.patch.object(links, name, value))
        own, _ = stack.enter_context(make(told))
        other, member = stack.enter_context(make([]))
        own.open(member)
        assert poll([own, other], lambda: any(isinstance(event, e.Opened) for event in told))
        # The other is in a call that keeps Python's lock.
        found = poll([own], lambda: any(isinstance(event, e.Silent) for event in told), limit_s=5 * SILENCE_S)
        assert found is is_silent
        assert any(isinstance(event, e.Quiet) for event in told)
        if not is_silent:  # It goes on, and is heard.
            assert poll([own, other], lambda: any(isinstance(event, e.Heard) for event in told))


def test_a_member_whose_node_answers_no_more_is_silent() -> None:
    told: list[Any] = []
    with (
        mock.patch.object(links, "find_process", lambda name: None),
        make(told) as (own, _),
        make([]) as (other, member),
    ):
        own.open(member)
        assert poll([own, other], lambda: any(isinstance(event, e.Opened) for event in told))
        with mock.patch("zorselike.runtime.alarm.heartbeat.has_arrived", lambda connection: False):
            assert poll([own], lambda: any(isinstance(event, e.Silent) for event in told))
