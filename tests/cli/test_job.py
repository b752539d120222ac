"""`zorselike run`, `join`, `status`, `leave`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trivial_member import TrivialWorker

from zorselike.cli import main
from zorselike.cli.job import run
from zorselike.cli.job.status import format_status
from zorselike.elastic.meeting import Meeting, make_member
from zorselike.elastic.meeting.environment import listen
from zorselike.elastic.meeting.nanny import LATE

TOKEN = "token"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a job with one member."""
    monkeypatch.setenv("ZORSELIKE_JOB_TOKEN", TOKEN)
    listener = listen("127.0.0.1", 0)
    me = make_member("127.0.0.1", listener.getsockname()[1], "node a", 0, "cpu", 0)
    meeting = Meeting(TrivialWorker(), me, listener, TOKEN, num_founding=1)
    meeting.next_generation()
    meeting.formed()
    meeting.filled()
    yield f"127.0.0.1:{me.port}"
    meeting.close()


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def find_free() -> str:
    """An address of this machine at which nobody listens."""
    with listen("127.0.0.1", 0) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_status_shows_members_and_what_happened(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("generation 1: running, 1 member, step ")
    assert lines[1] == "1 ranks"
    assert lines[2].split() == ["0", "node", "a", "local", "rank", "0", "cpu", "rank", "0", address, "leads"]
    assert lines[3].endswith("generation 1 runs")
    assert main(["status", address, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["generation"] == 1 and len(status["members"]) == 1
    status["arrivals"] = [status["members"][0] | {"node": "b"}]
    assert "  -  b local rank 0       cpu  waits" in format_status(status)


def test_a_node_is_told_to_leave(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no member of the job is on node 'b'" in fail(capsys, "leave", address, "--node", "b")
    assert main(["leave", address, "--node", "node a"]) == 0
    assert capsys.readouterr().out == "1 member of node a will leave at the next step boundary\n"


def test_mistakes_are_said(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "write it as HOST:PORT" in fail(capsys, "status", "here")
    assert "no member of a job answers at 127.0.0.1:1" in fail(capsys, "status", "127.0.0.1:1")
    assert "name the worker's program" in fail(capsys, "run", "--ranks", "2")
    assert "must be at least 1" in fail(capsys, "run", "--ranks", "0", "--", "true")
    assert "must be at least 2" in fail(capsys, "run", "--ranks", "2", "--members", "1", "--", "true")
    assert "--members is said where" in fail(capsys, "run", "--join", address, "--members", "2", "--", "true")
    assert "keep one" in fail(capsys, "run", "--join", address, "--address", "h:9", "--", "true")
    monkeypatch.setenv("ZORSELIKE_JOB_TOKEN", "another")
    assert "refuses the token" in fail(capsys, "status", address)
    assert "refuses the token" in fail(capsys, "join", address, "--", "true")
    monkeypatch.delenv("ZORSELIKE_JOB_TOKEN")
    assert "set ZORSELIKE_JOB_TOKEN" in fail(capsys, "status", address)


def test_a_wrong_silence_is_refused_before_workers_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZORSELIKE_SILENCE_S", "soon")
    assert "ZORSELIKE_SILENCE_S is 'soon'; it must be seconds" in fail(capsys, "run", "--", "train.py")


def test_where_no_job_can_be_founded_is_said_before_workers_start(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another job has the port, as by default that of this machine's first one; nobody knows the host."""
    taken = fail(capsys, "run", "--ranks", "2", "--address", address, "--", "true")
    assert f"--address: port {address.rpartition(':')[2]} is taken" in taken
    unknown = fail(capsys, "run", "--ranks", "2", "--address", "no.host.invalid:29600", "--", "true")
    assert "--address: no address is known for 'no.host.invalid'" in unknown


def test_run_starts_a_nanny_for_each_rank_and_says_how_others_join(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZORSELIKE_JOB_TOKEN", raising=False)
    names = ("FOUND", "MEMBERS", "JOIN", "NODE", "JOB_TOKEN")
    script = (
        f"import os; print(os.environ['LOCAL_RANK'], *(os.environ.get('ZORSELIKE_' + n) for n in {names}))"
    )
    began_s = time.monotonic()
    at = find_free()
    command = ["run", "--ranks", "2", "--members", "3", "--address", at, "--node", "n", "--"]
    assert main([*command, sys.executable, "-c", script]) == 0
    out, err = capfd.readouterr()
    founder, other = sorted(line.split() for line in out.splitlines())
    assert founder[:5] == ["0", at, "3", "None", "n"] and other[:5] == ["1", "None", "None", at, "n"]
    assert founder[5] == other[5] and len(founder[5]) == 32
    assert f"ZORSELIKE_JOB_TOKEN={founder[5]} zorselike run --join {at} --ranks N -- " in err
    assert f"zorselike status {at} --watch" in err and time.monotonic() > began_s


@pytest.mark.parametrize(
    ("ranks", "given", "expected"), [("3", None, "1"), ("3", "2", "2"), ("1", None, None)]
)
def test_workers_of_one_node_do_not_each_take_all_cores(
    monkeypatch: pytest.MonkeyPatch, ranks: str, given: str | None, expected: str | None
) -> None:
    started: list[Mapping[str, str]] = []

    def keep(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
        started.extend(environments)
        return 0

    monkeypatch.setattr(run, "keep", keep)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert main(["run", "--ranks", ranks, "--address", find_free(), "--", "program"]) == 0
    assert [each.get("OMP_NUM_THREADS") for each in started] == [expected] * int(ranks)


def test_who_joins_hears_at_once_that_nobody_answers_yet(capsys: pytest.CaptureFixture[str]) -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    assert run.find_job("127.0.0.1", port, TOKEN) == {"ZORSELIKE_JOIN": f"127.0.0.1:{port}"}
    said = capsys.readouterr().err
    assert said.startswith(f"no member of a job answers at 127.0.0.1:{port}: ")
    assert said.endswith("; workers wait up to 10 min for one\n")


def test_who_joins_a_job_that_has_answered_does_not_look_for_it_for_minutes(address: str) -> None:
    """It may end while workers start."""
    host, _, port = address.partition(":")
    expected = {"ZORSELIKE_JOIN": address, "ZORSELIKE_ANSWERED": "1"}
    assert run.find_job(host, int(port), TOKEN) == expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, LATE], 0), ([LATE, 0, 3], 3), ([LATE, LATE], LATE), ([137, 0, 1], 137), ([0, -9], 137)],
)
def test_who_came_too_late_for_a_job_that_ended_well_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], expected: int
) -> None:
    ended = iter(codes)

    def start(*_: Any, **__: Any) -> SimpleNamespace:
        code = next(ended)
        return SimpleNamespace(returncode=code, poll=lambda: code)

    monkeypatch.setattr(run.subprocess, "Popen", start)
    assert run.keep(["program"], [{}] * len(codes)) == expected


def test_workers_leave_where_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    """They went on to the job's end, with the node's GPUs, and nobody there to end them."""
    started, left = tmp_path / "started", tmp_path / "left"
    script = f"""
import os, pathlib, signal, time
def leave(*_):
    pathlib.Path({str(left)!r}).touch()
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
pathlib.Path({str(started)!r}).touch()
time.sleep(20)
"""
    keeps = (
        f"import sys; from zorselike.cli.job import run; run.keep([sys.executable, '-c', {script!r}], [{{}}])"
    )
    keeper = subprocess.Popen([sys.executable, "-c", keeps])
    await_file(started)
    assert not left.exists()
    keeper.kill()
    keeper.wait()
    await_file(left)


def await_file(path: Path) -> None:
    until_s = time.monotonic() + 60  # Where many tests run at once.
    while not path.exists():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_where_a_job_cannot_be_founded_the_others_of_its_node_end(tmp_path: Path) -> None:
    """Its port was taken after it had been looked at, say: they waited for minutes for who has it now."""
    waits = tmp_path / "has waited"
    script = f"""
import os, pathlib, sys, time
if "ZORSELIKE_FOUND" in os.environ:
    sys.exit(2)
time.sleep(20)
pathlib.Path({str(waits)!r}).touch()
"""
    environments = [{**os.environ, "ZORSELIKE_FOUND": "127.0.0.1:1"}, {**os.environ}]
    assert run.keep([sys.executable, "-I", "-S", "-c", script], environments) == 2
    assert not waits.exists()
