"""What a process does and says that has no part in its job yet."""

from __future__ import annotations

import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trivial_member import TrivialWorker

from tools.elastic.faults import make_plan
from tools.elastic.ranks import Job, build_model
from zorselike.elastic.contract import Generation, Member
from zorselike.elastic.deciding.leader import Leader
from zorselike.elastic.drawing import Drawings, Options
from zorselike.elastic.meeting import Meeting, make_member, meeting
from zorselike.elastic.meeting.environment import listen
from zorselike.elastic.meeting.waiting import describe_wait, is_spare
from zorselike.elastic.membership import events as e
from zorselike.elastic.membership import messages as msg
from zorselike.elastic.membership.machine import Membership
from zorselike.elastic.membership.roster import Roster
from zorselike.elastic.membership.round import Settings
from zorselike.elastic.running import Running
from zorselike.elastic.worker import ElasticWorker
from zorselike.errors import ClusterError
from zorselike.version import __version__

LIMIT_S = 30.0


def test_who_waits_is_told_for_what() -> None:
    founder, other = (make_member("h", port, "here", 0, "cpu", 0) for port in (1, 2))
    machine = Membership(founder)
    machine.handle(e.Found(3))
    assert describe_wait(machine) == "waits for members: 1 of the 3 that its job starts with are at h:1"
    machine = Membership(other)
    assert describe_wait(machine) == "waits for a member of its job to answer"
    machine.handle(e.Opened(founder))
    machine.handle(e.Received(founder.id, msg.Welcome(Roster(0, (founder,)))))
    expected = "waits for the other members with which the job that h:1 leads starts"
    assert (describe_wait(machine), is_spare(machine)) == (expected, False)
    machine.handle(e.Received(founder.id, msg.Welcome(Roster(4, (founder,)))))
    assert describe_wait(machine).startswith("waits as a spare: the job that h:1 leads takes it in when")
    assert is_spare(machine)


def test_who_waits_for_others_is_told_that_their_founder_has_ended() -> None:
    founder, other = (make_member("h", port, "here", 0, "cpu", 0) for port in (1, 2))
    machine = Membership(other)
    machine.handle(e.Opened(founder))
    machine.handle(e.Received(founder.id, msg.Welcome(Roster(0, (founder,)))))
    (over,) = (x for x in machine.handle(e.Dead(msg.Gone(founder.id, 0))) if isinstance(x, e.Over))
    assert "its founder, at h:1, has ended or cannot be reached, and not all members" in over.reason


def make_meeting(**options: Any) -> Meeting:
    listener = listen("127.0.0.1", 0)
    me = make_member("127.0.0.1", listener.getsockname()[1], "here", 0, "cpu", 0)
    return Meeting(TrivialWorker(), me, listener, options.pop("token", "token"), **options)


def test_who_waits_where_another_token_is_asked_for_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It had come before the founder, so that `zorselike run` had nobody to try its token on."""
    monkeypatch.setattr(meeting, "_SAY_AFTER_S", 0.02)
    founder = make_meeting(num_founding=2)
    limits = Settings(start_limit_s=1.5)
    other = make_meeting(contact=[("127.0.0.1", founder.member.port)], token="old", settings=limits)
    with pytest.raises(ClusterError, match="with this job's token"):
        other.next_generation()
    founder.close()
    where = f"127.0.0.1:{founder.member.port}"
    why = "who listens there refuses it: is its ZORSELIKE_JOB_TOKEN the job's?"
    said = f"waits for a member of its job to answer ({where}: {why})"
    assert any(text.endswith(said) for text in caplog.messages)


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid"])
def test_who_waits_where_nobody_answers_is_told_where_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    monkeypatch.setattr(meeting, "_SAY_AFTER_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone = make_meeting(contact=[(host, port)], settings=Settings(start_limit_s=1.0))
    with pytest.raises(ClusterError) as raised:
        alone.next_generation()
    why = "Connection refused" if host == "127.0.0.1" else "[A-Z].*"  # A resolver's own words.
    said = rf"waits for a member of its job to answer \({host}:{port}: {why}\)$"
    assert any(re.search(said, text) for text in caplog.messages)
    assert re.search(rf"answers at {host}:{port} \({host}:{port}: {why}\)$", str(raised.value))


def test_a_founder_that_waits_says_so_once_and_then_that_it_has_a_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "_SAY_AFTER_S", 0.02)
    founder = make_meeting(num_founding=2)
    address = ("127.0.0.1", founder.member.port)
    with ThreadPoolExecutor() as pool:
        founded = pool.submit(founder.next_generation)
        time.sleep(1.5)
        other = make_meeting(contact=[address])
        joined = pool.submit(other.next_generation)
        assert founded.result(LIMIT_S).number == joined.result(LIMIT_S).number
        founder.close()
        other.close()
    said = [text for text in caplog.messages if "waits for members" in text]
    assert said == [
        "elastic: this process waits for members: 1 of the 2 that its job starts with are at 127.0.0.1:"
        f"{address[1]}"
    ]
    assert "elastic: this process is rank 0 now" in caplog.messages


def make_worker() -> ElasticWorker:
    plan, num_layers = make_plan(random.Random(7), (1, 1), offload=False)
    job = Job(plan, num_layers, 1)
    return ElasticWorker(Leader(plan), Drawings(lambda: build_model(job), Options(), torch.device("cpu")))


@pytest.mark.parametrize(
    ("name", "own"), [("zorselike", __version__), ("torch", torch.__version__.split("+")[0])]
)
def test_who_comes_with_another_version_says_so_and_nobody_else_fails(name: str, own: str) -> None:
    """All failed by it, whoever was there, and twice: that ended the job."""
    worker = make_worker()
    settings = worker._drawings.list_settings() | {name: "0.0.9", "a key of that version": "1"}
    found = worker.take_settings({"settings": settings, "computes_in": None})
    assert found == f"{name} is {own} in this process, and 0.0.9 in the job that it has joined"


class NotingControl(SimpleNamespace):
    """Membership that notes of which failures it is told."""

    id = "id0"

    def fail(self, error: BaseException, *, step: int, may_recur: bool = False) -> None:
        self.told.append((str(error), may_recur))

    def request_change(self) -> None:
        """Nobody has."""


def make_running(
    me: Member, *others: str, source: list[int] | None, checkpoint: str | None = None
) -> Running:
    decision = {"source": source, "checkpoint": checkpoint}
    ranks = (me.id, *others)
    return Running(Generation(3, (me,), (), ranks, "127.0.0.1", 1, "loss", decision, None), me.id)


@pytest.mark.parametrize(("source", "checkpoint"), [([2, 7], None), (None, "step-7"), (None, None)])
def test_who_comes_to_others_and_fails_twice_before_it_has_done_a_step_ends_alone(
    source: list[int] | None, checkpoint: str | None
) -> None:
    """It ended the job of those who had trained until then."""
    worker, told = make_worker(), list[tuple[str, bool]]()
    me = make_member("127.0.0.1", 1, "here", 0, "cpu", 0)
    worker.control = NotingControl(told=told)
    running = make_running(me, source=source, checkpoint=checkpoint)
    worker.enter(running)
    for _ in range(2):
        worker.fail(torch.OutOfMemoryError("of the device"))  # Another plan may need less.
    worker.fail(RuntimeError("no such device"))
    worker.begin(running)  # Nor is it different in its first step.
    if source or checkpoint:
        with pytest.raises(ClusterError, match=r"failed twice before .* without it: RuntimeError: no such"):
            worker.fail(RuntimeError("no such device"))
    else:
        worker.fail(RuntimeError("no such device"))
    count = 1 if source or checkpoint else 2
    assert told == [("of the device", True)] * 2 + [("no such device", False)] * count


def test_what_all_fail_by_until_who_has_come_has_ended_does_not_count() -> None:
    """Such as a card that torch is not compiled for."""
    worker, told = make_worker(), list[tuple[str, bool]]()
    me = make_member("127.0.0.1", 1, "here", 0, "cpu", 0)
    worker.control = NotingControl(told=told, id=me.id)
    alone = make_running(me, source=[2, 7])
    worker.enter(alone)
    worker.begin(alone)
    worker.note_step(alone)
    for other in ("first", "second"):
        worker.enter(make_running(me, other, source=[2, 7]))
        for _ in range(3):
            worker.fail(ClusterError("an old card"))
    worker.enter(alone)
    worker.fail(ClusterError("an old card"))
    assert told == [("an old card", may_recur) for may_recur in (True, True, False) * 2 + (False,)]
